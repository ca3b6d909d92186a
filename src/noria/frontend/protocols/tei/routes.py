"""text-embeddings-inference's HTTP API, for its clients: huggingface_hub, LangChain, LlamaIndex and others.

It has no routes for token classification: `POST /` has them, as huggingface_hub's client reads them. Its protocol names
no model, so each route takes the first model of its task, unless the body has Noria's field `model`.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria import __version__
from noria.config import Config
from noria.errors import EngineUnavailable, OperationNotSupported
from noria.frontend.bodies.encoding_response import encoding_response
from noria.frontend.bodies.ranked_documents import SCORE_WEIGHT, RerankDocumentsBody, rank_documents
from noria.frontend.http.body import JsonBodyReader, apply_headers, decode
from noria.frontend.http.json_response import JsonResponse, json_response
from noria.frontend.http.operations import Handler
from noria.frontend.protocols.tei.bodies import (
    BodyKind,
    EmbedRequestBody,
    EncodeRequestBody,
    PredictRequestBody,
    RerankRequestBody,
    SimilarityRequestBody,
    TokenClassificationParameters,
    TokenClassificationRequestBody,
    TokenizeRequestBody,
    as_settings,
    encode_settings,
    similarity_settings,
    split_predict_inputs,
)
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.frontend.services.texts.scores import (
    RANKING_TASKS,
    Entity,
    entities,
    predictions,
    ranking_inputs,
    ranking_logits,
    ranks,
    similarities,
)
from noria.frontend.services.texts.text_request import TextRequestSettings
from noria.models.encoder.tokenizers.tokens import TextInput, Tokenizer
from noria.protocol.text import Activation, EncoderModelSpec, EncoderTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BodyT = TypeVar("BodyT", bound=Struct)


class Token(Struct, frozen=True):
    """A token of `POST /tokenize`; special tokens stand nowhere in the text."""

    id: int
    text: str  # from `start` to `stop`; of special tokens as in the vocabulary
    special: bool
    start: int | None  # in characters
    stop: int | None


class SparseValue(Struct, frozen=True):
    """A number of a sparse embedding that is not 0, and the token that it is for."""

    index: int
    value: float


class EmbeddingModel(Struct, frozen=True):
    """The pooling of an embedding model."""

    pooling: str


class LabelledModel(Struct, frozen=True):
    """The labels of a model."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(Struct, frozen=True, omit_defaults=True):
    """The one that the model is of."""

    embedding: EmbeddingModel | None = None
    classifier: LabelledModel | None = None
    reranker: LabelledModel | None = None
    token_classifier: LabelledModel | None = None  # Noria's


class Info(Struct, frozen=True):
    """The response of `GET /info`: the first text encoder. Null is what Noria does not have."""

    model_id: str
    model_sha: str  # its fingerprint
    model_dtype: str | None  # dtype of the engines; null: none is ready
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int | None
    max_input_length: int
    max_batch_tokens: int | None  # null: the engine chooses
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str  # version of Noria
    sha: str | None = None
    docker_label: str | None = None


_BATCH_READER = "@huggingface/inference"
"""How the header User-Agent of Hugging Face's client for JavaScript begins. It reads a batch, always."""

_CLASSIFICATIONS: Sequence[EncoderTask] = ("classification", "reranking")


class TeiRoutes:
    """The functions that serve the routes of `operations.py`."""

    def __init__(
        self,
        encoding_service: EncodingService,
        body_reader: JsonBodyReader,
        config: Config,
        num_frontends: Callable[[], int],
    ) -> None:
        self._encoding_service, self._body_reader, self._config = encoding_service, body_reader, config
        self._num_frontends = num_frontends

    async def root(self, http: Request) -> Response:
        """Serve the route of the model's kind, or that which the body is for."""
        raw = await self._body_reader.read(http)
        kind = decode(raw, BodyKind)
        if kind.has_query:
            return await self._rerank(http, raw, kind)
        if kind.has_sentences:
            return await self.similarity(http, decode(raw, SimilarityRequestBody))
        if kind.is_for_image or http.headers.get("accept", "").startswith("image/"):
            raise OperationNotSupported(
                "POST / is text-embeddings-inference's, for texts; images are generated by POST /t2i and, for OpenAI's "
                "clients, POST /v1/images/generations."
            )
        match self._encoding_service.resolve_model(kind.model, http.state.context).task:
            case "embedding":
                return await self.embed(http, decode(raw, EmbedRequestBody))
            case "token_embedding":
                return await self.embed_all(http, decode(raw, EncodeRequestBody))
            case "sparse_embedding":
                return await self.embed_sparse(http, decode(raw, EncodeRequestBody))
            case "token_classification":
                return await self._classify_tokens(http, decode(raw, TokenClassificationRequestBody))
            case task:
                return await self.predict(http, decode(raw, PredictRequestBody), (task,))

    def reading(self, body_type: type[BodyT], answer: Callable[[Request, BodyT], Awaitable[Response]]) -> Handler:
        """Return what reads a body and answers it."""

        async def handler(http: Request) -> Response:
            return await answer(http, await self._body_reader.read_json(http, body_type))

        return handler

    async def rerank(self, http: Request) -> Response:
        """Return how well each text matches the query, the best first."""
        raw = await self._body_reader.read(http)
        return await self._rerank(http, raw, decode(raw, BodyKind))

    async def tokenize(self, http: Request, body: TokenizeRequestBody) -> Response:
        """Return the tokens of each text."""
        inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        settings = TextRequestSettings(inputs=inputs, model=body.model, prompt_name=body.prompt_name)
        work = functools.partial(_tokens_body, add_special_tokens=body.add_special_tokens is not False)
        content = await self._encoding_service.with_tokenizer(settings, http.state.context, work)
        return JsonResponse(content)

    async def info(self, http: Request) -> Response:
        """Describe the first text encoder."""
        spec = self._encoding_service.resolve_model(None, http.state.context)
        engine, frontend = self._config.engine, self._config.frontend
        precision = self._encoding_service.engine_pool.reports.precision(spec)
        return json_response(
            Info(
                model_id=spec.name,
                model_sha=spec.fingerprint,
                model_dtype=None if precision is None else precision.dtype,
                served_model_name=spec.name,
                model_type=_model_type(spec),
                max_concurrent_requests=None,
                max_input_length=spec.max_length,
                max_batch_tokens=None if engine.encoder_batch_tokens == "auto" else engine.encoder_batch_tokens,
                max_batch_requests=None if engine.encoder_batch_texts == "auto" else engine.encoder_batch_texts,
                max_client_batch_size=frontend.max_texts,
                auto_truncate=frontend.truncate_texts,
                tokenization_workers=self._num_frontends(),
                version=__version__,
            )
        )

    async def health(self, _: Request) -> Response:
        """Return 200 and nothing if an engine is ready. Raises EngineUnavailable."""
        if not self._encoding_service.engine_pool.ready:
            raise EngineUnavailable("no engine is ready; GET /readyz has their states.")
        return Response()

    async def embed(self, http: Request, body: EmbedRequestBody) -> Response:
        """Return the embedding of each text."""
        body = apply_headers(body, http.headers)
        settings = encode_settings(body, dimensions=body.dimensions, normalize=body.normalize is not False)
        result = await self._encode(http, settings, ("embedding",))
        return await encoding_response(
            self._encoding_service, result, lambda: _list_body(map(_numbers_body, result.rows))
        )

    async def embed_sparse(self, http: Request, body: EncodeRequestBody) -> Response:
        """Return the numbers of each text's sparse embedding that are not 0."""
        result = await self._encode(http, encode_settings(apply_headers(body, http.headers)), ("sparse_embedding",))
        return await encoding_response(
            self._encoding_service, result, lambda: _list_body(map(_sparse_body, result.sparse_rows)), SCORE_WEIGHT
        )

    async def embed_all(self, http: Request, body: EncodeRequestBody) -> Response:
        """Return the vectors of each text's tokens."""
        result = await self._encode(http, encode_settings(apply_headers(body, http.headers)), ("token_embedding",))

        def encode() -> bytes:
            return _list_body(_list_body(map(_numbers_body, rows)) for rows in result.token_arrays())

        return await encoding_response(self._encoding_service, result, encode)

    async def predict(
        self, http: Request, body: PredictRequestBody, tasks: Sequence[EncoderTask] = _CLASSIFICATIONS
    ) -> Response:
        """Return the labels of each text or pair, the best first."""
        body = apply_headers(body, http.headers)
        inputs, is_batch = split_predict_inputs(body.inputs)
        result = await self._encode(http, as_settings(body, inputs=inputs), tasks)
        labels, activation, top_k = result.spec.labels, _activation(body, result.spec), None
        if body.parameters is not None:
            is_batch, top_k = True, body.parameters.top_k  # huggingface_hub's client reads a batch
        is_batch = is_batch or http.headers.get("user-agent", "").startswith(_BATCH_READER)

        def encode() -> bytes:
            each = (msgspec.json.encode(predictions(row.tolist(), labels, activation, top_k)) for row in result.rows)
            return _list_body(each) if is_batch else next(each)

        return await encoding_response(self._encoding_service, result, encode, SCORE_WEIGHT)

    async def _rerank(self, http: Request, raw: bytes, kind: BodyKind) -> Response:
        if kind.has_documents:
            return await rank_documents(http, decode(raw, RerankDocumentsBody), self._encoding_service, "1")
        body = apply_headers(decode(raw, RerankRequestBody), http.headers)
        spec = self._encoding_service.find_model(body.model, http.state.context, RANKING_TASKS)
        inputs = ranking_inputs(spec, body.query, body.texts)
        settings = as_settings(body, instruction=body.instruction, **inputs)
        result = await self._encode(http, settings, RANKING_TASKS)
        activation: Activation = "identity" if body.raw_scores else result.spec.activation
        texts = body.texts if body.return_text else None
        top_n = body.top_n if body.top_n is not None and body.top_n > 0 else None
        return await encoding_response(
            self._encoding_service,
            result,
            lambda: msgspec.json.encode(ranks(ranking_logits(result), activation, texts)[:top_n]),
            SCORE_WEIGHT,
        )

    async def similarity(self, http: Request, body: SimilarityRequestBody) -> Response:
        """Return how similar each sentence's embedding is to the source's."""
        body = apply_headers(body, http.headers)
        result = await self._encode(http, similarity_settings(body), ("embedding",))

        def encode() -> bytes:
            source, *others = result.rows
            return msgspec.json.encode(similarities(result.spec.similarity, source, others))

        return await encoding_response(self._encoding_service, result, encode)

    async def _classify_tokens(self, http: Request, body: TokenClassificationRequestBody) -> Response:
        body = apply_headers(body, http.headers)
        inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        result = await self._encode(http, as_settings(body, inputs=inputs), ("token_classification",))
        parameters = body.parameters or TokenClassificationParameters()

        def encode() -> bytes:
            found = _entities_of_each(result, inputs, parameters)
            each = map(msgspec.json.encode, found)
            return next(each) if isinstance(body.inputs, str) else _list_body(each)

        return await encoding_response(self._encoding_service, result, encode, SCORE_WEIGHT)

    async def _encode(
        self, http: Request, settings: TextRequestSettings, tasks: Sequence[EncoderTask]
    ) -> EncodingResult:
        return await self._encoding_service.encode(settings, tasks, http.state.context)


def _model_type(spec: EncoderModelSpec) -> ModelType:
    labelled = LabelledModel(
        {str(index): label for index, label in enumerate(spec.labels)},
        {label: index for index, label in enumerate(spec.labels)},
    )
    match spec.task:
        case "embedding":
            return ModelType(embedding=EmbeddingModel(",".join(spec.pooling)))
        case "sparse_embedding" | "token_embedding":
            return ModelType(embedding=EmbeddingModel("splade" if spec.task == "sparse_embedding" else "none"))
        case "classification":
            return ModelType(classifier=labelled)
        case "reranking":
            return ModelType(reranker=labelled)
        case "token_classification":
            return ModelType(token_classifier=labelled)


def _activation(body: PredictRequestBody, spec: EncoderModelSpec) -> Activation:
    """Return what the client asks for, or the model's own."""
    function = body.parameters.function_to_apply if body.parameters is not None else None
    if function is None:
        return "identity" if body.raw_scores else spec.activation
    return "identity" if function == "none" else function


def _entities_of_each(
    result: EncodingResult, inputs: Sequence[str], parameters: TokenClassificationParameters
) -> Iterator[list[Entity]]:
    ignored = ("O",) if parameters.ignore_labels is None else parameters.ignore_labels
    aggregation = parameters.aggregation_strategy or "simple"
    rows = iter(result.rows)
    for text, tokenized in zip(inputs, result.texts, strict=True):
        tokens = [(span, row.tolist()) for span, row in zip(tokenized.spans, rows, strict=False) if span is not None]
        yield entities(text, tokens, result.spec.labels, aggregation, ignored)


def _tokens_body(tokenizer: Tokenizer, inputs: Sequence[TextInput], *, add_special_tokens: bool) -> bytes:
    return _list_body(
        msgspec.json.encode([
            Token(span.token_id, span.text, True, None, None)
            if span.is_special
            else Token(span.token_id, text[span.start : span.end], False, span.start, span.end)
            for span in tokenizer.spans(text, add_special_tokens=add_special_tokens)
        ])
        for text in inputs
        if isinstance(text, str)
    )  # fmt: skip


def _numbers_body(row: "memoryview[float] | NDArray[np.float32]") -> bytes:
    return msgspec.json.encode(row.tolist())


def _sparse_body(row: Sequence[tuple[int, float]]) -> bytes:
    return msgspec.json.encode([SparseValue(index, value) for index, value in row])


def _list_body(parts: Iterable[bytes]) -> bytes:
    """Return a JSON list. Each part is encoded alone, so that a thread holds the interpreter lock for microseconds."""
    return b"[" + b",".join(parts) + b"]"
