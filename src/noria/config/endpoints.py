"""The settings of endpoints with code of the operator's."""

import pathlib
from typing import Annotated, Any

from msgspec import Meta, Struct


class EndpointConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of `endpoints`: a class of the operator's, served at `POST /v1/endpoints/NAME`."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    code: Annotated[str, Meta(pattern=r"^.+:[A-Za-z_]\w*\Z")]  # FILE.py:CLASS
    model: str = ""  # the text encoder of its texts; empty: the first one
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 30.0  # limit for each call of preprocess and postprocess
    load_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0  # limit for the file and its `load`
    settings: dict[str, Any] = {}  # what `load` gets as `ctx.settings`

    @property
    def file(self) -> pathlib.Path:
        """The file of `code`."""
        return pathlib.Path(self.code.rpartition(":")[0]).absolute()

    @property
    def class_name(self) -> str:
        """The class of `code`."""
        return self.code.rpartition(":")[2]
