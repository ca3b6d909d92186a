"""The objects that classes of endpoints with user code get, and what they may raise: docs/user-code.md.

A class needs no base. Each of its methods `load(ctx)`, `preprocess(body, state)` and `postprocess(result, state)` may
be left out (not both of the last two), and may be async.
"""

import pathlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noria.errors import InvalidField, NoriaError
from noria.protocol.text import EncoderModelSpec

if TYPE_CHECKING:
    import numpy as np  # takes a tenth of a second, which front ends without such code need not spend
    from numpy.typing import NDArray


__all__ = ["Context", "InvalidInput", "NoriaError", "Result", "State"]


class InvalidInput(InvalidField):
    """Raise it for a request that is the client's mistake: it is answered 400 with this message."""


@dataclass(frozen=True)
class Context:
    """The argument that `load` gets, once in each front-end process and again when the file has changed."""

    endpoint: str  # its name
    folder: pathlib.Path  # folder of the file
    settings: Mapping[str, Any]  # the table `settings` of the endpoint
    model: EncoderModelSpec | None  # model of the endpoint's texts; None: this server has no text encoder


@dataclass(frozen=True)
class Result:
    """The result of a text encoder."""

    rows: (
        "NDArray[np.float32]"  # n × dimensions: embeddings or logits, one row for each text; for each token, if tokens
    )
    #                              are classified
    spec: EncoderModelSpec  # the model; `labels` names the columns of logits
    num_tokens: int  # tokens of all texts, special tokens included
    num_truncated: int = 0  # texts that were too long for the model and were cut


class State:
    """A request: `preprocess` and `postprocess` get the same object, and may set attributes of their own on it."""

    def __init__(
        self,
        request_id: str,
        record: Callable[[str, float | str], None],
        call: Callable[[str, Mapping[str, Any]], Awaitable[Any]],
    ) -> None:
        self.request_id = request_id
        self._record, self._call = record, call

    def record(self, name: str, value: float | str) -> None:
        """Add a value to a statistic of the class or of the configuration, from any thread.

        Raises ValueError if there is no such one, or its kind has no such values.
        """
        self._record(name, value)

    async def call(self, name: str, body: Mapping[str, Any]) -> Any:
        """Call an endpoint or a model of this server, for the same client, within the same deadline.

        Returns what the endpoint's `postprocess` returned; of a text encoder a `Result`, for a body such as
        `{"inputs": ["a cat"]}`; of an image model the JSON of `POST /t2i` as a dict, for a body as that route has it.

        Raises NoriaError: the call was rejected or failed. If it is not caught, it is the error of this request.
        """
        return await self._call(name, body)

    if TYPE_CHECKING:  # attributes of the user's own

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
