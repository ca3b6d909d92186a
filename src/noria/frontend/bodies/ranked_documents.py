"""A query and its documents, as the rerankers' APIs of Jina, Cohere and vLLM have them, and the documents in order.

Unknown fields are ignored, as these servers do.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import EmptyInput, InvalidField, short_repr
from noria.frontend.bodies.encoding_response import encoding_response
from noria.frontend.bodies.image_fields import add_bounds
from noria.frontend.http.body import apply_headers
from noria.frontend.http.operations import JsonObject, Served
from noria.frontend.services.images.request_validation import Limits
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.scores import RANKING_TASKS, num_rows_of_query, ranking_inputs, ranking_logits, ranks
from noria.frontend.services.texts.text_request import TextRequestSettings
from noria.protocol.request import Priority
from noria.protocol.text import EncoderModelSpec

SCORE_WEIGHT = 32  # estimated: a score takes 0.7 µs, a number of an embedding 0.06


class TextDocument(Struct, frozen=True):
    """A document that is an object."""

    text: str


class RerankDocumentsBody(Struct, frozen=True, kw_only=True):
    """The fields of Jina, Cohere and vLLM, then Noria's."""

    query: str
    documents: list[str | TextDocument]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | Literal["true", "false"] | None = None  # RAGFlow sends the word
    rank_fields: list[Literal["text"]] | None = None
    max_tokens_per_doc: int | None = None
    truncate: bool | None = None
    instruction: str | None = None
    priority: Priority | int | None = None  # Cohere's is a number, of which 0 is the default
    deadline_ms: int | None = None


class RankedDocument(Struct, frozen=True):
    """A document of a request, and how well it matches the query: from 0 to 1."""

    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class RerankUsage(Struct, frozen=True):
    """How many tokens the pairs of query and document had, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class RerankApiVersion(Struct, frozen=True):
    """The version of Cohere's API that the route is of."""

    version: str


class RerankBilledUnits(Struct, frozen=True):
    """A request is one search."""

    search_units: int = 1


class RerankTokens(Struct, frozen=True):
    """The same number as `RerankUsage`."""

    input_tokens: int
    output_tokens: int = 0


class RerankMeta(Struct, frozen=True):
    """The part of the response that Cohere's clients read."""

    api_version: RerankApiVersion
    billed_units: RerankBilledUnits
    tokens: RerankTokens


class RankedDocuments(Struct, frozen=True):
    """The documents' indices and scores, the best first."""

    id: str  # the request's
    model: str
    results: list[RankedDocument]
    usage: RerankUsage
    meta: RerankMeta


INSTRUCTION = "what makes a document relevant, for rerankers whose template has an instruction; default: the model's"

RERANK_FIELDS = {
    "query": "what the documents are compared with",
    "documents": "the documents to rank: texts, or objects with `text`",
    "model": "the name of a served reranker, or `noria` for the first one, which is the default",
    "top_n": "return so many of the best; below 1 all",
    "return_documents": "return each document with its score; default: false",
    "rank_fields": '`["text"]` is the only one',
    "max_tokens_per_doc": "at least the model's maximum length, to which query and document are cut together",
    "truncate": "cut documents that are too long, or reject them; default: `frontend.truncate_texts`",
    "instruction": INSTRUCTION,
    "priority": "`low`, `normal` or `high`: the order in which waiting texts are encoded; a number, as Cohere's "
    "clients send, changes nothing",
    "deadline_ms": "milliseconds from now in which the response is needed; rejected at once if that is not possible",
}


async def rank_documents(
    http: Request, body: RerankDocumentsBody, service: EncodingService, api_version: str
) -> Response:
    """Return a `RankedDocuments`. Scores are sigmoids, also where the model's configuration says logits.

    Of a model that embeds tokens a score is the mean over the query's tokens of the best cosine, at least 0.

    Raises:
        EmptyInput: the query or a document is empty.
        InvalidField: a field asks for what is not done.
        NoriaError: the request was rejected or failed.
    """
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    _check(body, documents)
    spec = service.find_model(body.model, http.state.context, RANKING_TASKS)
    if body.max_tokens_per_doc is not None:
        _check_cut(body.max_tokens_per_doc, spec)
    priority = body.priority if isinstance(body.priority, str) else None
    urgency = apply_headers(_Urgency(priority, body.deadline_ms), http.headers)
    settings = TextRequestSettings(
        **ranking_inputs(spec, body.query, documents),
        model=body.model,
        truncate=body.truncate,
        instruction=body.instruction,
        priority=urgency.priority,
        deadline_ms=urgency.deadline_ms,
    )
    result = await service.encode(settings, RANKING_TASKS, http.state.context)
    has_documents = body.return_documents in (True, "true")
    top_n = body.top_n if body.top_n is not None and body.top_n > 0 else None

    def encode() -> bytes:
        logits = ranking_logits(result)
        if is_late := result.spec.task == "token_embedding":  # the mean of cosines, which is at most 1
            logits = [max(0.0, each / num_rows_of_query(result)) for each in logits]
        results = [
            RankedDocument(rank.index, rank.score, TextDocument(documents[rank.index]) if has_documents else UNSET)
            for rank in ranks(logits, "identity" if is_late else "sigmoid")[:top_n]
        ]
        num_tokens = result.num_tokens
        meta = RerankMeta(RerankApiVersion(api_version), RerankBilledUnits(), RerankTokens(num_tokens))
        usage = RerankUsage(num_tokens, num_tokens)
        return msgspec.json.encode(RankedDocuments(http.state.request_id, result.spec.name, results, usage, meta))

    return await encoding_response(service, result, encode, SCORE_WEIGHT)


class _Urgency(Struct, frozen=True):
    priority: Priority | None
    deadline_ms: int | None


def _check(body: RerankDocumentsBody, documents: list[str]) -> None:
    """Check that the query and each document have text. Raises EmptyInput."""
    if not body.query:
        raise EmptyInput("query is empty.", field="query")
    if not documents:
        raise EmptyInput("documents is empty; send at least one.", field="documents")
    if not all(documents):
        raise EmptyInput(f"documents[{documents.index('')}] is empty; leave it out.", field="documents")


def _check_cut(max_tokens: int, spec: EncoderModelSpec) -> None:
    if max_tokens < spec.max_length:
        raise InvalidField(
            f"max_tokens_per_doc is {short_repr(max_tokens)}, which would cut documents before they are paired with "
            f"the query; allowed is at least {spec.max_length}, to which {spec.name} cuts the pair. Leave it out, or "
            "send shorter documents.",
            field="max_tokens_per_doc",
        )


def describe_documents(schemas: dict[str, JsonObject], served: Served) -> None:
    """Add the bounds of the fields of `RerankDocumentsBody`."""
    config = served.config
    text: JsonObject = {"type": "string", "minLength": 1, "maxLength": config.max_text_chars}
    schemas[TextDocument.__name__]["properties"]["text"] |= text
    properties = schemas[RerankDocumentsBody.__name__]["properties"]
    properties["query"] |= text
    properties["documents"] |= {"minItems": 1, "maxItems": config.max_texts}
    properties["documents"]["items"]["anyOf"][0] |= text
    add_bounds(properties["deadline_ms"], Limits(1, int(config.request_timeout_s * 1000), None))
