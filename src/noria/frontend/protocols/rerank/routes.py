"""`POST /v1/rerank` and `/v2/rerank`, for the clients of Jina, Cohere and vLLM: LiteLLM, Open WebUI, Dify and others.

`POST /rerank` does the same for a body with `documents`; it is text-embeddings-inference's.
"""

import functools

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import NoriaError
from noria.frontend.bodies.ranked_documents import (
    RERANK_FIELDS,
    RankedDocuments,
    RerankDocumentsBody,
    describe_documents,
    rank_documents,
)
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.errors import ErrorDetail, ErrorDialect, error_body
from noria.frontend.http.operations import Operation
from noria.frontend.services.texts.encoding import EncodingService


class RerankErrorBody(Struct, frozen=True):
    """The body of every error: `message` is Cohere's, `detail` Jina's, `error` vLLM's and Noria's own."""

    message: str
    detail: str
    error: ErrorDetail


def _error_body(error: NoriaError, request_id: str) -> RerankErrorBody:
    return RerankErrorBody(error.message, error.message, error_body(error, request_id).error)


RERANK_ERRORS = ErrorDialect(RerankErrorBody, _error_body)


class RerankRoutes:
    """The routes `POST /v1/rerank` and `POST /v2/rerank`."""

    def __init__(self, encoding_service: EncodingService, body_reader: JsonBodyReader) -> None:
        self._encoding_service, self._body_reader = encoding_service, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        operation = functools.partial(
            Operation,
            method="POST",
            group="Encode texts",
            scopes=("generate",),
            body=RerankDocumentsBody,
            fields=RERANK_FIELDS,
            example={"query": "what is red?", "documents": ["a red circle", "a blue square"]},
            response=RankedDocuments,
            errors_as=RERANK_ERRORS,
            describe=describe_documents,
        )
        return [
            operation(
                path="/v1/rerank",
                handler=functools.partial(self._rerank, api_version="1"),
                summary="Rank documents with Jina's, Cohere's and vLLM's API",
                description="The documents' indices and scores, the best first. Their unmodified clients work.",
            ),
            operation(
                path="/v2/rerank",
                handler=functools.partial(self._rerank, api_version="2"),
                summary="Rank documents with version 2 of Cohere's API",
                description="As `/v1/rerank`.",
            ),
        ]

    async def _rerank(self, http: Request, api_version: str) -> Response:
        body = await self._body_reader.read_json(http, RerankDocumentsBody)
        return await rank_documents(http, body, self._encoding_service, api_version)
