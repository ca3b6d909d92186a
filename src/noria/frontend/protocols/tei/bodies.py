"""The bodies of text-embeddings-inference's routes: its fields, those that its clients add, then Noria's.

As there, unknown fields are ignored.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from noria.errors import EmptyInput, InvalidField
from noria.frontend.services.texts.scores import Aggregation
from noria.frontend.services.texts.text_request import (
    InputType,
    InputTypeOrTask,
    TextRequestSettings,
    role_of,
    split_input,
)
from noria.models.encoder.tokenizers.tokens import TextInput
from noria.protocol.request import Priority
from noria.protocol.text import TruncationSide

TruncationDirection = Literal["right", "left", "Right", "Left"]


class TextOptions(Struct, frozen=True, kw_only=True):
    """The fields of all bodies."""

    truncate: bool | None = None
    truncation_direction: TruncationDirection | None = None
    model: str | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None


class EncodeRequestBody(TextOptions, frozen=True, kw_only=True):
    """The body of `POST /embed_sparse` and `POST /embed_all`."""

    inputs: str | list[str | int | list[int]]  # a text, texts, the token ids of a text, or those of texts
    prompt_name: str | None = None
    input_type: InputType | None = None
    task: InputTypeOrTask | None = None


class EmbedRequestBody(EncodeRequestBody, frozen=True, kw_only=True):
    """The body of `POST /embed`."""

    normalize: bool | None = None
    dimensions: int | None = None
    encoding_format: Literal["float"] | None = None


class ClassificationParameters(Struct, frozen=True):
    """huggingface_hub's options of a classification."""

    top_k: Annotated[int, Meta(ge=1)] | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None


class PredictRequestBody(TextOptions, frozen=True, kw_only=True):
    """The body of `POST /predict`."""

    inputs: str | list[str | list[str]]  # a text, a pair, or a list of lists with a text or a pair each
    raw_scores: bool | None = None
    parameters: ClassificationParameters | None = None


class RerankRequestBody(TextOptions, frozen=True, kw_only=True):
    """The body of `POST /rerank`."""

    query: str
    texts: list[str]
    raw_scores: bool | None = None
    return_text: bool | None = None
    top_n: int | None = None
    instruction: str | None = None


class SimilarityInputs(Struct, frozen=True):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Struct, frozen=True):
    """The options of `POST /similarity`."""

    truncate: bool | None = None
    truncation_direction: TruncationDirection | None = None
    prompt_name: str | None = None


class SimilarityRequestBody(Struct, frozen=True, kw_only=True):
    """The body of `POST /similarity`."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    model: str | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None


class TokenizeRequestBody(Struct, frozen=True, kw_only=True):
    """The body of `POST /tokenize`."""

    inputs: str | list[str]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: str | None = None


class TokenClassificationParameters(Struct, frozen=True):
    """huggingface_hub's options of a classification of tokens."""

    aggregation_strategy: Aggregation | None = None
    ignore_labels: list[str] | None = None


class TokenClassificationRequestBody(TextOptions, frozen=True, kw_only=True):
    """The body of `POST /` for a model that classifies tokens."""

    inputs: str | list[str]
    parameters: TokenClassificationParameters | None = None


_IMAGE_PARAMETERS = frozenset(
    {"guidance_scale", "height", "negative_prompt", "num_inference_steps", "scheduler", "seed", "target_size", "width"}
)


class BodyKind(Struct, frozen=True):
    """The fields of a body of `POST /` and `POST /rerank` that show what it is for."""

    model: str | None = None
    inputs: msgspec.Raw = msgspec.Raw()  # empty: it has none
    query: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    parameters: object = None

    @property
    def has_query(self) -> bool:
        """Whether it is for `POST /rerank`."""
        return len(memoryview(self.query)) > 0

    @property
    def has_documents(self) -> bool:
        """Whether a body with a query has documents, as Jina's and vLLM's, in place of texts."""
        return len(memoryview(self.documents)) > 0 and len(memoryview(self.texts)) == 0

    @property
    def is_for_image(self) -> bool:
        """Whether its parameters are those of Hugging Face's clients for images, which it cannot have."""
        return isinstance(self.parameters, dict) and not _IMAGE_PARAMETERS.isdisjoint(self.parameters)

    @property
    def has_sentences(self) -> bool:
        """Whether it is for `POST /similarity`."""
        return bytes(memoryview(self.inputs)[:1]) == b"{"


def truncation_side(direction: TruncationDirection | None) -> TruncationSide | None:
    """Return the side; None: the model's own."""
    return None if direction is None else "left" if direction.lower() == "left" else "right"


def as_settings(body: TextOptions, **asked: Any) -> TextRequestSettings:
    """Return what the body asks for; `asked` are the fields of `TextRequestSettings` that not all bodies have."""
    return TextRequestSettings(
        model=body.model,
        truncate=body.truncate,
        truncation_side=truncation_side(body.truncation_direction),
        priority=body.priority,
        deadline_ms=body.deadline_ms,
        **asked,
    )


def encode_settings(body: EncodeRequestBody, **asked: Any) -> TextRequestSettings:
    """Return what the body asks for, as `as_settings`. Raises InvalidField."""
    inputs, token_ids = split_input(body.inputs, "inputs")
    role = role_of(body.input_type, body.task)
    return as_settings(
        body, inputs=inputs, token_ids=token_ids, prompt_name=body.prompt_name, role=role, task=body.task, **asked
    )


def similarity_settings(body: SimilarityRequestBody) -> TextRequestSettings:
    """Return what the body asks for: the model's own embeddings, that of the source first. Raises EmptyInput."""
    if not body.inputs.sentences:
        raise EmptyInput("sentences is empty; send at least one.", field="inputs")
    parameters = body.parameters or SimilarityParameters()
    return TextRequestSettings(
        inputs=[body.inputs.source_sentence, *body.inputs.sentences],
        model=body.model,
        truncate=parameters.truncate,
        truncation_side=truncation_side(parameters.truncation_direction),
        prompt_name=parameters.prompt_name,
        priority=body.priority,
        deadline_ms=body.deadline_ms,
    )


def split_predict_inputs(got: str | list[str | list[str]]) -> tuple[Sequence[TextInput], bool]:
    """Return the texts and pairs, and whether they are a batch. Raises InvalidField."""
    if isinstance(got, str):
        return [got], False
    texts = [each for each in got if isinstance(each, str)]
    if len(texts) == len(got):
        return [_text_or_pair(texts)] if texts else [], False
    rows = [each for each in got if isinstance(each, list)]
    if len(rows) < len(got):
        raise InvalidField(
            'inputs mixes texts and lists; allowed are a text, a pair ["a", "b"], or a list of lists with a text or a '
            'pair each, such as [["a"], ["b", "c"]].',
            field="inputs",
        )
    return [_text_or_pair(row) for row in rows], True


def _text_or_pair(texts: Sequence[str]) -> TextInput:
    match texts:
        case [text]:
            return text
        case [first, second]:
            return first, second
    raise InvalidField(
        f'inputs has a list of {len(texts)} texts where a text or a pair belongs; for a batch send [["a"], ["b"]].',
        field="inputs",
    )
