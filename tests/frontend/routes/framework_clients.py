"""Has the clients of LangChain and LlamaIndex embed texts: `python framework_clients.py URL`, in their environment.

Reads texts as JSON from standard input; prints the embeddings of each client, of texts and of a query.
"""

import json
import sys
from typing import Any

import httpx
from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

url, texts = sys.argv[1], json.load(sys.stdin)
results: dict[str, tuple[Any, Any]] = {}
with httpx.Client() as http:
    openai = OpenAIEmbeddings(
        model="noria", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, http_client=http
    )
    results["langchain-openai"] = openai.embed_documents(texts), openai.embed_query(texts[0])
endpoint = HuggingFaceEndpointEmbeddings(huggingfacehub_api_token="none")
endpoint.client = InferenceClient(url)
results["langchain-huggingface"] = endpoint.embed_documents(texts), endpoint.embed_query(texts[0])
llama = TextEmbeddingsInference(model_name="noria", base_url=url)
results["llama-index"] = llama.get_text_embedding_batch(texts), llama.get_query_embedding(texts[0])
json.dump(results, sys.stdout)
