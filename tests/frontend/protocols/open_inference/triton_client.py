"""Calls a server by the unmodified tritonclient; runs in an environment of its own, because that needs another protobuf.

Prints a JSON object by protocol: what the server answered. `triton_client.py HTTP_ADDRESS GRPC_ADDRESS MODEL`.
"""

import importlib
import json
import sys

import numpy as np

TEXTS = ["a red circle", "größe"]


def ask(triton, address, model):
    client = triton.InferenceServerClient(address)
    is_http = triton.__name__.endswith("http")
    as_json = {} if is_http else {"as_json": True}
    found = {
        "health": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model), client.is_model_ready(model, "1")],
        "unknown": client.is_model_ready("other") if is_http else None,
        "server": client.get_server_metadata(**as_json)["name"],
        "metadata": client.get_model_metadata(model, **as_json),
        "config": client.get_model_config(model, **as_json),
        "index": client.get_model_repository_index(**as_json),
    }  # fmt: skip
    texts = np.array([[each] for each in TEXTS], dtype=object)
    text = triton.InferInput("TEXT", list(texts.shape), "BYTES")
    text.set_data_from_numpy(texts)
    options = {"request_id": "abc", "priority": 1, "timeout": 60_000_000}
    answer = client.infer(model, [text], **options)
    found["embedding"] = answer.as_numpy("embedding").tolist()
    found["id"] = answer.get_response()["id"] if is_http else answer.get_response().id
    output = triton.InferRequestedOutput("embedding")
    found["one_output"] = client.infer(model, [text], outputs=[output]).as_numpy("embedding").tolist()
    if is_http:
        text.set_data_from_numpy(texts, binary_data=False)
        output = triton.InferRequestedOutput("embedding", binary_data=False)
        found["json"] = client.infer(model, [text], outputs=[output]).as_numpy("embedding").tolist()
    ids = np.array([[5, 6, 7, 0], [8, 9, 0, 0]], np.int64)
    tokens = []
    for name, values in (("input_ids", ids), ("attention_mask", (ids > 0).astype(np.int64))):
        tokens.append(triton.InferInput(name, list(ids.shape), "INT64"))
        tokens[-1].set_data_from_numpy(values)
    found["tokens"] = client.infer(model, tokens).as_numpy("embedding").tolist()
    found["statistics"] = client.get_inference_statistics(model, **as_json)["model_stats"][0]
    found["errors"] = []
    for wrong in (
        lambda: client.infer("other", [text]),
        lambda: client.infer(model, tokens[:1]),
        lambda: client.load_model(model),
    ):
        try:
            wrong()
        except Exception as error:
            found["errors"].append([type(error).__name__, error.status(), error.message()])
    client.close()
    return found


if __name__ == "__main__":
    http, grpc, model = sys.argv[1:]
    found = {
        name: ask(importlib.import_module(f"tritonclient.{name}"), address, model)
        for name, address in (("http", http), ("grpc", grpc))
    }
    print(json.dumps(found))
