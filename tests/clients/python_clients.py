"""Calls a server by other people's unmodified clients, in their environment: `python python_clients.py URL GRPC`.

Prints a JSON object: for each call "ok", or what it raised.
"""

import asyncio
import base64
import datetime
import io
import json
import os
import sys
import traceback

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads one

import cohere
import httpx
import kserve
import litellm
import numpy as np
import openai
from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
from openlineage.client.transport.http import HttpConfig, HttpTransport
from openlineage.client.uuid import generate_new_uuid

URL, GRPC = sys.argv[1:]
TEXTS = ["a red circle", "größe"]
RANKING = {"query": "red", "documents": ["a red circle", "blue", "a dog"], "top_n": 2}
KEY = {"api_key": "none"}
OF_IMAGE = {"inference_steps": 2, "seed": 1}
openai_client = openai.OpenAI(base_url=f"{URL}/v1", **KEY)


def expected():
    """The embeddings as a plain request gets them."""
    answer = httpx.post(f"{URL}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()
    return np.float32([each["embedding"] for each in answer["data"]])


def same(rows):
    np.testing.assert_allclose(np.float32(rows).reshape(len(TEXTS), -1), EXPECTED, atol=1e-5)


def is_png(b64_json):
    assert base64.b64decode(b64_json).startswith(b"\x89PNG"), b64_json[:20]


def openai_images():
    is_png(openai_client.images.generate(prompt="a red circle", size="64x64", extra_body=OF_IMAGE).data[0].b64_json)


def openai_image_stream():
    events = openai_client.images.generate(
        prompt="a red circle", size="64x64", stream=True, partial_images=1, extra_body=OF_IMAGE
    )
    assert [each.type for each in events][-1] == "image_generation.completed"


def openai_edit():
    made = openai_client.images.generate(prompt="a red circle", size="64x64", extra_body=OF_IMAGE).data[0].b64_json
    file = io.BytesIO(base64.b64decode(made))
    file.name = "a.png"
    edited = openai_client.images.edit(image=file, prompt="a blue circle", extra_body={"inference_steps": "4"})
    is_png(edited.data[0].b64_json)


def openai_models():
    names = [model.id for model in openai_client.models.list()]
    assert "minilm" in names
    assert openai_client.models.retrieve(names[0]).id == names[0]


def openai_embeddings():
    same([each.embedding for each in openai_client.embeddings.create(model="minilm", input=TEXTS).data])


def kserve_infer(client, url, *, is_binary):
    text = kserve.InferInput("TEXT", [len(TEXTS)], "BYTES", parameters={"content_type": "str"})
    text.set_data_from_numpy(np.array(TEXTS, dtype=object), binary_data=is_binary)
    request = kserve.InferRequest(model_name="minilm", infer_inputs=[text], parameters={"custom": 1})

    async def infer():
        if url is None:
            return await client().infer(request)
        return await client().infer(url, request, model_name="minilm")

    same(asyncio.run(infer()).outputs[0].as_numpy())


def kserve_rest():
    return kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", retries=0))


def kserve_probes():
    async def ask():
        client = kserve_rest()
        return [await client.is_server_live(URL), await client.is_model_ready(URL, "minilm")]

    assert asyncio.run(ask()) == [True, True]


def litellm_rerank():
    answer = litellm.rerank(
        model="huggingface/rerank", query="red", documents=["a red circle", "blue"], top_n=1, api_base=URL, **KEY
    )
    assert len(answer.results) == 1


def is_ranking(results):
    """Whether these are the two best documents of `RANKING`."""
    best = httpx.post(f"{URL}/rerank", json={"query": "red", "texts": RANKING["documents"]}, timeout=60).json()[:2]
    assert [each["index"] for each in results] == [each["index"] for each in best]
    scores = [each["relevance_score"] for each in results]
    np.testing.assert_allclose(scores, [each["score"] for each in best], rtol=1e-6)


def litellm_documents(provider, api_base):
    is_ranking(litellm.rerank(model=f"{provider}/reranker", **RANKING, api_base=api_base, **KEY).results)


def cohere_rerank(client_type):
    answer = client_type(api_key="none", base_url=URL).rerank(model="reranker", **RANKING)
    is_ranking([each.model_dump() for each in answer.results])
    assert answer.meta.tokens.input_tokens > 0


def cohere_error():
    body = {}
    try:
        cohere.ClientV2(api_key="none", base_url=URL).rerank(model="none", query="red", documents=["a"])
    except cohere.NotFoundError as error:
        body = error.body
    assert "'none'" in body["message"], body


def litellm_embedding():
    answer = litellm.embedding(model="openai/minilm", input=TEXTS, api_base=f"{URL}/v1", **KEY)
    same([each["embedding"] for each in answer.data])


def litellm_image():
    answer = litellm.image_generation(
        model="openai/noria", prompt="a red circle", size="64x64", api_base=f"{URL}/v1", **KEY
    )
    is_png(answer.data[0].b64_json)


def hugging_face_labels():
    found = InferenceClient(f"{URL}/predict").text_classification("what a lovely day")
    assert {each.label for each in found} == {"LABEL_0", "LABEL_1"}


def hugging_face_similarity():
    assert len(InferenceClient(URL).sentence_similarity("a cat", other_sentences=["a dog", "blue"])) == 2


def langchain_hugging_face():
    endpoint = HuggingFaceEndpointEmbeddings(huggingfacehub_api_token="none")
    endpoint.client = InferenceClient(URL)
    same(endpoint.embed_documents(TEXTS))


def langchain_openai():
    with httpx.Client() as http:
        options = {"base_url": f"{URL}/v1", "check_embedding_ctx_length": False, "http_client": http, **KEY}
        same(OpenAIEmbeddings(model="minilm", **options).embed_documents(TEXTS))


def llama_index(client):
    same(client.get_text_embedding_batch(TEXTS))
    client.get_query_embedding(TEXTS[0])


def openlineage_event():
    now = datetime.datetime.now(datetime.UTC).isoformat()
    run, job = Run(runId=str(generate_new_uuid())), Job(namespace="clients", name="train")
    client = OpenLineageClient(transport=HttpTransport(HttpConfig(url=URL)))
    client.emit(RunEvent(eventType=RunState.START, eventTime=now, run=run, job=job, producer="https://example.com"))


CALLS = {
    "openai: images": openai_images,
    "openai: stream of an image": openai_image_stream,
    "openai: edit": openai_edit,
    "openai: models": openai_models,
    "openai: embeddings": openai_embeddings,
    "kserve: probes": kserve_probes,
    "kserve: REST": lambda: kserve_infer(kserve_rest, URL, is_binary=False),
    "kserve: REST, binary": lambda: kserve_infer(kserve_rest, URL, is_binary=True),
    "kserve: gRPC": lambda: kserve_infer(lambda: kserve.InferenceGRPCClient(GRPC), None, is_binary=False),
    "kserve: gRPC, binary": lambda: kserve_infer(lambda: kserve.InferenceGRPCClient(GRPC), None, is_binary=True),
    "litellm: rerank": litellm_rerank,
    "litellm: rerank, Cohere's": lambda: litellm_documents("cohere", URL),
    "litellm: rerank, Jina's": lambda: litellm_documents("jina_ai", URL),
    "litellm: rerank, vLLM's": lambda: litellm_documents("hosted_vllm", URL),
    "cohere: rerank": lambda: cohere_rerank(cohere.Client),
    "cohere: rerank, version 2": lambda: cohere_rerank(cohere.ClientV2),
    "cohere: error": cohere_error,
    "litellm: embedding": litellm_embedding,
    "litellm: image": litellm_image,
    "huggingface_hub: features": lambda: same([InferenceClient(URL).feature_extraction(text) for text in TEXTS]),
    "huggingface_hub: similarity": hugging_face_similarity,
    "huggingface_hub: classification": hugging_face_labels,
    "langchain: huggingface": langchain_hugging_face,
    "langchain: openai": langchain_openai,
    "llama-index: TEI": lambda: llama_index(TextEmbeddingsInference(model_name="noria", base_url=URL)),
    "llama-index: openai": lambda: llama_index(
        OpenAILikeEmbedding(model_name="minilm", api_base=f"{URL}/v1", reuse_client=False, **KEY)
    ),
    "openlineage: event": openlineage_event,
}


def outcome(call):
    try:
        call()
    except Exception:
        return traceback.format_exc()
    return "ok"


if __name__ == "__main__":
    EXPECTED = expected()
    print(json.dumps({name: outcome(call) for name, call in CALLS.items()}))
