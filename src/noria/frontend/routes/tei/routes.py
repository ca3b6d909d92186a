"""text-embeddings-inference's HTTP API, for its clients: huggingface_hub, LangChain, LlamaIndex and others.

It has no routes for token classification: `POST /` has them, as huggingface_hub's client reads them. Its protocol names
no model, so each route takes the first model of its task, unless the body has Noria's field `model`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria import __version__
from noria.config import Config
from noria.errors import EngineUnavailable
from noria.frontend.http.body import JsonBodyReader, decode
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.http.json_response import json_response
from noria.frontend.routes.encoding_response import encoding_response
from noria.frontend.routes.openai.embeddings import split_input
from noria.frontend.routes.tei.bodies import (
    BodyKind,
    EmbedRequestBody,
    PredictRequestBody,
    RerankRequestBody,
    SimilarityRequestBody,
    TokenClassificationParameters,
    TokenClassificationRequestBody,
    TokenizeRequestBody,
    as_settings,
    similarity_settings,
    split_predict_inputs,
)
from noria.frontend.services.priority_headers import apply_headers
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.frontend.services.texts.scores import Entity, activation_of, cosine, entities, predictions, ranks
from noria.frontend.services.texts.text_request import TextRequestSettings
from noria.models.encoder.tokens import TextInput, Tokenizer
from noria.protocol.text import Activation, EncoderModelSpec, EncoderTask


class Token(Struct, frozen=True):
    """A token of `POST /tokenize`; special tokens stand nowhere in the text."""

    id: int
    text: str  # from `start` to `stop`; of special tokens as in the vocabulary
    special: bool
    start: int | None  # in characters
    stop: int | None


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
    model_dtype: str | None  # of the engines; null: none is ready
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int | None
    max_input_length: int
    max_batch_tokens: int | None  # null: the engine chooses
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str  # of Noria
    sha: str | None = None
    docker_label: str | None = None


_SCORE_WEIGHT = 32  # estimated: the softmax alone takes 0.7 µs a label, a number of an embedding 0.06

_CLASSIFICATIONS: Sequence[EncoderTask] = ("classification", "reranking")


class TeiRoutes:
    """The routes."""

    def __init__(
        self,
        encoding_service: EncodingService,
        body_reader: JsonBodyReader,
        config: Config,
        num_frontends: Callable[[], int],
    ) -> None:
        self._encoding_service, self._body_reader, self._config = encoding_service, body_reader, config
        self._num_frontends = num_frontends

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [
            Route("/", self.root, methods=["POST"]),
            Route("/embed", self.embed, methods=["POST"]),
            Route("/predict", self.predict, methods=["POST"]),
            Route("/rerank", self.rerank, methods=["POST"]),
            Route("/similarity", self.similarity, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/info", self.info),
            Route("/health", self.health),
        ]

    async def root(self, http: Request) -> Response:
        """Serve the route of the model's kind, or that which the body is for."""
        raw = await self._body_reader.read(http)
        kind = decode(raw, BodyKind)
        if kind.has_query:
            return await self._rerank(http, decode(raw, RerankRequestBody))
        if kind.has_sentences:
            return await self._similarity(http, decode(raw, SimilarityRequestBody))
        match self._encoding_service.resolve_model(kind.model).task:
            case "embedding":
                return await self._embed(http, decode(raw, EmbedRequestBody))
            case "token_classification":
                return await self._classify_tokens(http, decode(raw, TokenClassificationRequestBody))
            case task:
                return await self._predict(http, decode(raw, PredictRequestBody), (task,))

    async def embed(self, http: Request) -> Response:
        """Return the embedding of each text."""
        return await self._embed(http, await self._body_reader.read_json(http, EmbedRequestBody))

    async def predict(self, http: Request) -> Response:
        """Return the labels of each text or pair, the best first."""
        return await self._predict(http, await self._body_reader.read_json(http, PredictRequestBody), _CLASSIFICATIONS)

    async def rerank(self, http: Request) -> Response:
        """Return how well each text matches the query, the best first."""
        return await self._rerank(http, await self._body_reader.read_json(http, RerankRequestBody))

    async def similarity(self, http: Request) -> Response:
        """Return the cosine of each sentence's embedding and the source's."""
        return await self._similarity(http, await self._body_reader.read_json(http, SimilarityRequestBody))

    async def tokenize(self, http: Request) -> Response:
        """Return the tokens of each text."""
        body = await self._body_reader.read_json(http, TokenizeRequestBody)
        inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        settings = TextRequestSettings(inputs=inputs, model=body.model, prompt_name=body.prompt_name)
        work = functools.partial(_tokens_body, add_special_tokens=body.add_special_tokens is not False)
        content = await self._encoding_service.with_tokenizer(settings, http.state.api_client, work)
        return Response(content, media_type="application/json")

    async def info(self, _: Request) -> Response:
        """Describe the first text encoder."""
        spec, engine, frontend = self._encoding_service.resolve_model(None), self._config.engine, self._config.frontend
        precision = self._encoding_service.engine_pool.precision(spec)
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

    async def _embed(self, http: Request, body: EmbedRequestBody) -> Response:
        body = apply_headers(body, http.headers)
        inputs, token_ids = split_input(body.inputs, "inputs")
        settings = as_settings(
            body,
            inputs,
            token_ids,
            dimensions=body.dimensions,
            normalize=body.normalize is not False,
            prompt_name=body.prompt_name,
        )
        result = await self._encode(http, settings, ("embedding",))
        return await encoding_response(
            self._encoding_service, result, lambda: _list_body(map(_numbers_body, result.rows))
        )

    async def _predict(self, http: Request, body: PredictRequestBody, tasks: Sequence[EncoderTask]) -> Response:
        body = apply_headers(body, http.headers)
        inputs, is_batch = split_predict_inputs(body.inputs)
        result = await self._encode(http, as_settings(body, inputs), tasks)
        labels, activation, top_k = result.spec.labels, _activation(body, result.spec), None
        if body.parameters is not None:
            is_batch, top_k = True, body.parameters.top_k  # huggingface_hub's client reads a batch

        def encode() -> bytes:
            each = (msgspec.json.encode(predictions(row.tolist(), labels, activation, top_k)) for row in result.rows)
            return _list_body(each) if is_batch else next(each)

        return await encoding_response(self._encoding_service, result, encode, _SCORE_WEIGHT)

    async def _rerank(self, http: Request, body: RerankRequestBody) -> Response:
        body = apply_headers(body, http.headers)
        result = await self._encode(
            http, as_settings(body, [(body.query, text) for text in body.texts]), ("reranking",)
        )
        activation: Activation = "identity" if body.raw_scores else "sigmoid"
        texts = body.texts if body.return_text else None
        return await encoding_response(
            self._encoding_service,
            result,
            lambda: msgspec.json.encode(ranks(result.numbers, activation, texts)),
            _SCORE_WEIGHT,
        )

    async def _similarity(self, http: Request, body: SimilarityRequestBody) -> Response:
        body = apply_headers(body, http.headers)
        result = await self._encode(http, similarity_settings(body), ("embedding",))

        def encode() -> bytes:
            source, *others = result.rows
            return msgspec.json.encode([cosine(source, other) for other in others])

        return await encoding_response(self._encoding_service, result, encode)

    async def _classify_tokens(self, http: Request, body: TokenClassificationRequestBody) -> Response:
        body = apply_headers(body, http.headers)
        inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        result = await self._encode(http, as_settings(body, inputs), ("token_classification",))
        parameters = body.parameters or TokenClassificationParameters()

        def encode() -> bytes:
            found = _entities_of_each(result, inputs, parameters)
            each = map(msgspec.json.encode, found)
            return next(each) if isinstance(body.inputs, str) else _list_body(each)

        return await encoding_response(self._encoding_service, result, encode, _SCORE_WEIGHT)

    async def _encode(
        self, http: Request, settings: TextRequestSettings, tasks: Sequence[EncoderTask]
    ) -> EncodingResult:
        state = http.state
        work = self._encoding_service.encode(settings, tasks, state.api_client, state.request_id)
        return await cancel_on_disconnect(http, work)


def _model_type(spec: EncoderModelSpec) -> ModelType:
    """Return text-embeddings-inference's description of a model."""
    labelled = LabelledModel(
        {str(index): label for index, label in enumerate(spec.labels)},
        {label: index for index, label in enumerate(spec.labels)},
    )
    match spec.task:
        case "embedding":
            return ModelType(embedding=EmbeddingModel(",".join(spec.pooling)))
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
        return "identity" if body.raw_scores else activation_of(spec)
    return "identity" if function == "none" else function


def _entities_of_each(
    result: EncodingResult, inputs: Sequence[str], parameters: TokenClassificationParameters
) -> Iterator[list[Entity]]:
    """Yield the entities of each text."""
    ignored = ("O",) if parameters.ignore_labels is None else parameters.ignore_labels
    aggregation = parameters.aggregation_strategy or "simple"
    rows = iter(result.rows)
    for text, tokenized in zip(inputs, result.texts, strict=True):
        tokens = [(span, row.tolist()) for span, row in zip(tokenized.spans, rows, strict=False) if span is not None]
        yield entities(text, tokens, result.spec.labels, aggregation, ignored)


def _tokens_body(tokenizer: Tokenizer, inputs: Sequence[TextInput], *, add_special_tokens: bool) -> bytes:
    """Return the tokens of each text as JSON."""
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


def _numbers_body(row: "memoryview[float]") -> bytes:
    return msgspec.json.encode(row.tolist())


def _list_body(parts: Iterable[bytes]) -> bytes:
    """Return a JSON list. Each part is encoded alone, so that a thread holds the interpreter lock for microseconds."""
    return b"[" + b",".join(parts) + b"]"
