"""A client's request to a text encoder, and the message to the engine that it becomes; for every protocol. Pure."""

import array
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from noria.errors import EmptyInput, InvalidField, short_repr
from noria.models.encoder.tokenizers.tokens import TextInput, TokenizedText
from noria.protocol.request import Priority
from noria.protocol.text import EncoderModelSpec, TextPayload, TruncationSide

TextRole = Literal["query", "document"]
"""The side of a search that texts are on."""

InputType = Literal[
    "query", "search_query", "retrieval.query", "document", "passage", "search_document", "retrieval.passage"
]
"""The names that Cohere, Jina, NVIDIA and Voyage have for the two sides of a search."""

Task = Literal["separation", "classification", "text-matching"]
"""Jina's tasks that are no side of a search."""

InputTypeOrTask = Literal[InputType, Task]

MAX_TOKEN_NUMBERS = 2**25  # numbers of the vectors of a request's tokens: 128 MiB, and up to 700 MB of JSON
MAX_FILLED_CHARS = 2**24  # characters of a request's filled templates, which repeat query and instruction

SIDE_FIELDS = {
    "input_type": "the side of a search that the texts are on, which chooses the model's prompt of that side, if it "
    "has one; default: the model's default prompt",
    "task": "another name of `input_type`, which is Jina's, or a task of models with adapters (jina-embeddings-v3)",
}
"""The fields of bodies that have an `InputType`, and what they mean."""

_PROMPTS_OF_ROLE: Mapping[TextRole, Sequence[str]] = {
    "query": ("query", "search_query", "retrieval.query", "s2p_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage"),
}
"""The names of prompts in published models."""


class TextRequestSettings(Struct, frozen=True, kw_only=True):
    """The settings that a client asks for, as far as they are given; the same for every protocol."""

    inputs: Sequence[TextInput] = ()
    images: Mapping[int, str] = {}  # files in base64 by their place, ascending; the texts have the other places
    token_ids: Sequence[Sequence[int]] = ()  # instead of `inputs`: texts that the client has tokenized
    type_ids: Sequence[bytes] = ()  # token types of `token_ids`, a byte for each token; empty: all 0
    model: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None  # None: as the model's own configuration says
    truncate: bool | None = None  # None: the server's setting
    truncation_side: TruncationSide | None = None  # None: as the model's own configuration says
    prompt_name: str | None = None  # None: that of `role`
    role: TextRole | None = None  # None: the model's default prompt
    task: InputTypeOrTask | None = None  # as sent; another than a side of a search has no `role`
    is_ranking: bool = False  # whether the first text is a query, and all others are its documents
    is_dense: bool = False  # whether the response has zeros: after shorter texts, and of sparse embeddings
    instruction: str | None = None  # for decoders that rerank; None: that of the prompt, or the template's own
    priority: Priority | None = None
    deadline_ms: int | None = None

    @property
    def num_texts(self) -> int:
        """The number of inputs: a pair counts as one, and an image too."""
        return len(self.inputs) + len(self.token_ids) + len(self.images)

    def role_at(self, index: int) -> TextRole | None:
        """Return the side of a search that a text is on."""
        if not self.is_ranking:
            return self.role
        return "document" if index else "query"

    def without_images(self) -> "TextRequestSettings":
        """Return the settings with the places of images alone, since files are long."""
        return msgspec.structs.replace(self, images=dict.fromkeys(self.images, "")) if self.images else self

    def name(self, index: int) -> str:
        """Return what errors call a text: its number without the query of a ranking; images count."""
        if self.images:
            places = (place for place in range(self.num_texts) if place not in self.images)
            index = next(itertools.islice(places, index, None))
        if not self.is_ranking:
            return f"text {index}"
        return f"text {index - 1}" if index else "the query"


def role_of(input_type: InputType | None, task: InputTypeOrTask | None) -> TextRole | None:
    """Return the side that a body's `SIDE_FIELDS` name. Raises InvalidField: they differ."""
    if input_type is None and task is None:
        return None
    sides = {_side(name) for name in (input_type, task) if name is not None}
    if len(sides) > 1:
        raise InvalidField(
            f"input_type is {input_type!r} and task is {task!r}, which differ; send one of them.", field="task"
        )
    return next((side for side in get_args(TextRole) if side in sides), None)


def _side(name: InputTypeOrTask) -> str:
    if name in get_args(Task):
        return name
    return "query" if name.endswith("query") else "document"


class InputObject(Struct, frozen=True, forbid_unknown_fields=True):
    """A text or an image, as Jina's clients send them."""

    text: str | None = None
    image: str | None = None  # a file in base64, or as a data: URL


def split_objects(
    got: str | InputObject | list[str | int | list[int] | InputObject],
) -> tuple[str | list[str | int | list[int]], Mapping[int, str]]:
    """Return what `got` has beside images, and these by their place.

    Raises InvalidField: an object is not one of both, or there are token ids beside images.
    """
    if isinstance(got, str):
        return got, {}
    others, images = list[str | int | list[int]](), dict[int, str]()
    for place, each in enumerate([got] if isinstance(got, InputObject) else got):
        match each:
            case InputObject(text=str(text), image=None):
                others.append(text)
            case InputObject(text=None, image=str(image)):
                images[place] = image
            case InputObject():
                has = "neither text nor" if each.text is None else "both text and"
                raise InvalidField(f"input[{place}] has {has} image; send one of them.", field="input")
            case _:
                others.append(each)
    if images and not all(isinstance(each, str) for each in others):
        raise InvalidField("input mixes images and token ids; send texts beside images.", field="input")
    return others, images


def split_input(
    got: str | list[str | int | list[int]], field: str = "input"
) -> tuple[Sequence[str], Sequence[Sequence[int]]]:
    """Return the texts, and the texts that are token ids; one of both is empty. Raises InvalidField, naming `field`."""
    if isinstance(got, str):
        return [got], ()
    texts = [each for each in got if isinstance(each, str)]
    if len(texts) == len(got):
        return texts, ()
    ids = [each for each in got if isinstance(each, int)]
    if len(ids) == len(got):
        return (), [ids]
    rows = [each for each in got if isinstance(each, list)]
    if len(rows) == len(got):
        return (), rows
    raise InvalidField(
        f"{field} mixes texts and token ids; allowed are a text, a list of texts, a list of token ids, or a list of "
        "those.",
        field=field,
    )


def with_prompt(settings: TextRequestSettings, spec: EncoderModelSpec) -> Sequence[TextInput]:
    """Return the texts with the prompt of their side before each. Pairs have none; in a template it is the instruction.

    Raises:
        InvalidField: the model takes pairs, and there is a text alone; or the filled templates are too long.

    """
    if settings.is_ranking:
        return [
            _prompt(settings, spec, settings.role_at(index)) + text
            for index, text in enumerate(settings.inputs)
            if isinstance(text, str)
        ]
    prompt = _prompt(settings, spec, settings.role)
    if spec.template is not None:
        instruction = settings.instruction or prompt
        _check_filled(settings.inputs, len(instruction))
        return [_filled(each, index, spec, instruction) for index, each in enumerate(settings.inputs)]
    if not prompt:
        return settings.inputs
    return [prompt + text if isinstance(text, str) else text for text in settings.inputs]


def _prompt(settings: TextRequestSettings, spec: EncoderModelSpec, role: TextRole | None) -> str:
    if not spec.prompts:
        return ""
    prompts, name = dict(spec.prompts), settings.prompt_name or spec.default_prompt or ""
    if settings.prompt_name is None and (role is not None or settings.task is not None):
        # A model without a prompt for it needs none.
        name = next((each for each in _names(settings, role) if each in prompts), "")
    return prompts.get(name, "")


def _names(settings: TextRequestSettings, role: TextRole | None) -> Sequence[str]:
    """Return the names of prompts and adapters for what the texts are."""
    if role is not None:
        return _PROMPTS_OF_ROLE[role]
    return () if settings.task is None else [settings.task]


def adapter_of(settings: TextRequestSettings, spec: EncoderModelSpec) -> int:
    """Return the place, from 1, of the adapter that the texts have; 0: none.

    Without side and task the name of their prompt chooses it.

    Raises:
        InvalidField: the model has none for what they are, and no prompt of this task.

    """
    names, tasks = _names(settings, settings.role), [adapter.task for adapter in spec.adapters]
    if not names and not tasks:
        return 0
    chosen = names or [settings.prompt_name or spec.default_prompt or ""]
    found = next((tasks.index(name) + 1 for name in chosen if name in tasks), 0)
    is_prompt = not tasks and (settings.role is not None or settings.task in dict(spec.prompts))
    if names and not found and not is_prompt:
        allowed = ", ".join(tasks) or "query and document alone: it has neither an adapter nor a prompt of this task"
        field = "input_type" if settings.task is None else "task"
        raise InvalidField(
            f"{field} is {(settings.task or settings.role)!r}; allowed for {spec.name} are {allowed}.", field=field
        )
    return found


def _check_filled(inputs: Sequence[TextInput], num_instruction_chars: int) -> None:
    pairs = [each for each in inputs if not isinstance(each, str)]
    num_chars = sum([len(first) + len(second) for first, second in pairs]) + len(inputs) * num_instruction_chars
    if num_chars > MAX_FILLED_CHARS:
        raise InvalidField(
            f"the {len(inputs)} documents, each with the query and the instruction, have {num_chars} characters; "
            f"allowed are at most {MAX_FILLED_CHARS}. Send fewer documents, or a shorter query.",
            field="input",
        )


def _filled(text: TextInput, index: int, spec: EncoderModelSpec, instruction: str) -> str:
    assert spec.template is not None
    if isinstance(text, str):
        raise InvalidField(
            f"text {index} is a text alone; {spec.name} takes pairs of a query and a document.", field="input"
        )
    return spec.template.fill(*text, instruction)


def pack_token_ids(
    ids: Sequence[int], index: int, spec: EncoderModelSpec, side: TruncationSide, type_ids: bytes = b""
) -> TokenizedText:
    """Return a text that the client has tokenized, with whatever special tokens it has.

    Raises:
        InvalidField: it is empty, or has an id that the model does not know.

    """
    if not ids:
        raise EmptyInput(f"text {index} is empty.", field="input")
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < spec.vocab_size)
        raise InvalidField(
            f"text {index} has the token id {short_repr(wrong)}; {spec.name} has the ids 0 to {spec.vocab_size - 1}. "
            "Send the text itself, unless your tokens are of this model's tokenizer (LangChain's are, with "
            "check_embedding_ctx_length=False).",
            field="input",
        )
    part = slice(spec.max_length) if side == "right" else slice(-spec.max_length, None)
    kept = ids[part]
    packed = array.array("H" if spec.vocab_size <= 65_536 else "I", kept)
    if sys.byteorder == "big":
        packed.byteswap()
    return TokenizedText(len(kept), packed.tobytes(), type_ids[part], len(ids) - len(kept))


def length_limit(role: TextRole | None, spec: EncoderModelSpec) -> int:
    """Return how many tokens a text may have on its side of a search."""
    late = spec.late_interaction
    if late is None or role is None:
        return spec.max_length
    return late.query_length if role == "query" else late.document_length


def fit_to_role(text: TokenizedText, role: TextRole | None, spec: EncoderModelSpec) -> TokenizedText:
    """Cut a text of a model that embeds tokens to the length of its side of a search, and fill a query up.

    Tokens that get no vector are noted; `role` None counts as a document of any length.
    """
    late = spec.late_interaction
    assert late is not None
    width, skipped = len(text.token_ids) // text.num_tokens, frozenset(late.skipped_ids if role != "query" else ())
    ids = memoryview(text.token_ids).cast("H" if width == 2 else "I").tolist()  # little-endian, as this machine is
    num_cut = max(len(ids) - length_limit(role, spec), 0)
    if num_cut:
        num_last = int(late.ends_texts)
        del ids[len(ids) - num_last - num_cut : len(ids) - num_last]
    num_own = len(ids)
    if role == "query" and late.fill_id is not None:
        ids += [late.fill_id] * (late.fill_length - num_own)
    return text._replace(
        num_tokens=len(ids),
        token_ids=array.array("H" if width == 2 else "I", ids).tobytes(),
        num_cut=text.num_cut + num_cut,
        num_seen=0 if late.is_fill_seen else num_own,
        skipped=[index for index, each in enumerate(ids) if each in skipped or (late.skips_first and index == 0)],
    )


def make_payload(texts: Sequence[TokenizedText], spec: EncoderModelSpec, settings: TextRequestSettings) -> TextPayload:
    """Return the payload of tokenized texts."""
    lengths = tuple([text.num_tokens for text in texts])
    type_ids = b""
    for text in texts:
        if text.type_ids:
            type_ids = b"".join([text.type_ids or bytes(text.num_tokens) for text in texts])
            break
    return TextPayload(
        spec.task,
        len(texts),
        sum(lengths),
        num_truncated(texts),
        lengths=lengths,
        token_ids=texts[0].token_ids if len(texts) == 1 else b"".join([text.token_ids for text in texts]),
        type_ids=type_ids,
        num_seen=tuple(text.num_seen for text in texts) if any(text.num_seen for text in texts) else (),
        id_bytes=2 if spec.vocab_size <= 65_536 else 4,
        image_places=tuple(settings.images),
        dimensions=settings.dimensions,
        normalize=spec.normalize if settings.normalize is None else settings.normalize,
        adapter=adapter_of(settings, spec),
    )


def check_size(payload: TextPayload, spec: EncoderModelSpec, *, is_dense: bool) -> None:
    """Raise InvalidField if the vectors of all tokens, or the zeros of `is_dense`, are too many for one response."""
    is_sparse = spec.task == "sparse_embedding"
    if is_dense and (is_sparse or spec.task.startswith("token_")):
        shape = [payload.num_texts, *([] if is_sparse else [max(payload.lengths)]), spec.dimensions]
        if math.prod(shape) > MAX_TOKEN_NUMBERS:
            raise InvalidField(
                f"the result of {spec.name} would have the shape {shape}, which is {math.prod(shape)} numbers, zeros "
                f"included; allowed are {MAX_TOKEN_NUMBERS}. Send fewer texts.",
                field="input",
            )
    allowed = MAX_TOKEN_NUMBERS // spec.dimensions
    if spec.task == "token_embedding" and payload.num_tokens > allowed:
        raise InvalidField(
            f"the texts have {payload.num_tokens} tokens; of {spec.name} a request may have the vectors of {allowed}. "
            "Send fewer texts, or a job.",
            field="input",
        )


def num_truncated(texts: Sequence[TokenizedText]) -> int:
    """Return how many texts were cut."""
    return sum([text.num_cut > 0 for text in texts])
