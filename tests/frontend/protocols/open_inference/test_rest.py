"""The Open Inference Protocol over REST, in front of a fake engine."""

import json
import struct

import numpy as np
import pytest

from noria.engine.loop import ExecutedBatch
from noria.engine.monitoring.engine_metrics import EngineMetrics
from noria.engine.runtime import FinishedBatch
from noria.protocol.model_spec import ModelKey
from noria.scheduling.types import BatchKey, BatchPlan, BatchResult, ItemId
from noria.testing.fake_encoder import fake_vector, word_id

INFER = "/v2/models/fake-encoder/infer"
HEADER = "Inference-Header-Content-Length"
EMBEDDING = {"name": "embedding"}


def text(*texts, **changes):
    return {"name": "TEXT", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)} | changes


def tensor(name, rows, datatype="INT64"):
    return {"name": name, "shape": list(np.shape(rows)), "datatype": datatype, "data": rows}


def vector(*words):
    return fake_vector([1, *map(word_id, words), 2])


def infer(client, *inputs, path=INFER, **body):
    return client.post(path, json={"inputs": list(inputs)} | body)


def binary(client, body, *tensors, headers=None, path=INFER):
    head = json.dumps(body).encode()
    headers = {HEADER: str(len(head))} if headers is None else headers
    return client.post(path, content=b"".join([head, *tensors]), headers=headers)


def packed(*texts):
    return b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in texts)


def test_embeddings_are_those_of_openais_api(client):
    texts = ["a cat", "größe"]
    of_openai = client.post("/v1/embeddings", json={"input": texts}).json()["data"]
    answer = infer(client, text(*texts), id="abc")
    (output,) = answer.json()["outputs"]
    expected = [number for each in of_openai for number in each["embedding"]]
    assert output == {"name": "embedding", "datatype": "FP32", "shape": [2, 8], "data": expected}
    assert {name: answer.json()[name] for name in ("id", "model_name", "model_version")} == {
        "id": "abc", "model_name": "fake-encoder", "model_version": "1",
    }  # fmt: skip
    assert answer.headers["x-noria-model"] == "fake-encoder"
    assert "id" not in infer(client, text("a")).json()


@pytest.mark.parametrize(
    ("changes", "body"),
    [
        ({}, {"model_name": "fake-encoder", "model_version": "1", "raw_input_contents": None}),  # KServe's client
        ({}, {"id": None, "parameters": None, "outputs": None}),
        ({"parameters": None}, {"outputs": []}),
        ({"parameters": {"content_type": "str"}}, {"parameters": {"content_type": "str", "headers": {"x": "y"}}}),
        ({"parameters": {"binary_data_size": None, "shared_memory_region": None}}, {"outputs": [EMBEDDING]}),
        ({}, {"outputs": [EMBEDDING | {"data": [], "parameters": None}]}),
        ({}, {"outputs": [EMBEDDING | {"parameters": {"binary_data": False, "classification": 0}}]}),
        ({}, {"parameters": {"sequence_id": 0, "sequence_start": False, "priority": None, "timeout": None}}),
        ({"dtype": "x", "extra": {"deep": [1]}}, {"unknown": [{}], "parameters": {"custom": [1, {"a": None}]}}),
    ],
)
def test_what_has_no_meaning_for_the_model_is_ignored_as_in_triton(client, changes, body):
    expected = infer(client, text("a cat")).json()["outputs"]
    answer = infer(client, text("a cat", **changes), **body)
    assert (answer.status_code, answer.json().get("outputs")) == (200, expected)


@pytest.mark.parametrize("changes", [{"shape": [2, 1]}, {"shape": [2, 1], "data": [["a cat"], ["dogs"]]}])
def test_a_column_of_texts_may_be_flat_or_nested(client, changes):
    got = infer(client, text("a cat", "dogs", **changes)).json()["outputs"][0]["data"]
    np.testing.assert_array_equal(np.float32(got).reshape(2, 8), [vector("a", "cat"), vector("dogs")])


@pytest.mark.parametrize("wants", [{"parameters": {"binary_data_output": True}}, {"outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}])  # fmt: skip
def test_binary_tensors_follow_the_json_both_ways(client, wants):
    raw = packed("a cat", "größe", "")[:-4]
    described = {"name": "TEXT", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    answer = binary(client, {"inputs": [described]} | wants, raw)
    length = int(answer.headers[HEADER])
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert output == {"name": "embedding", "datatype": "FP32", "shape": [2, 8], "parameters": {"binary_data_size": 64}}
    got = np.frombuffer(answer.content[length:], "<f4").reshape(2, 8)
    np.testing.assert_array_equal(got, [vector("a", "cat"), vector("größe")])


def test_tokens_are_those_that_the_mask_marks_in_the_order_of_their_tensors(client):
    ids, mask = [[1, 50, 2, 0], [0, 1, 60, 2]], [[1, 1, 1, 0], [0, 1, 1, 1]]
    expected = [fake_vector([1, 50, 2]), fake_vector([1, 60, 2])]
    answer = infer(client, tensor("attention_mask", mask), tensor("input_ids", ids, "INT32"))
    got = answer.json()["outputs"][0]["data"]
    np.testing.assert_array_equal(np.float32(got).reshape(2, 8), expected)
    inputs = [
        {"name": name, "shape": [2, 4], "datatype": "INT64", "parameters": {"binary_data_size": 64}}
        for name in ("attention_mask", "input_ids")
    ]
    raw = [np.array(rows, "<i8").tobytes() for rows in (mask, ids)]
    assert binary(client, {"inputs": inputs}, *raw).json()["outputs"][0]["data"] == got


def test_a_body_without_json_is_one_text_and_its_response_binary(client):
    answer = client.post(INFER, content=b"a cat", headers={HEADER: "0"})
    np.testing.assert_array_equal(
        np.frombuffer(answer.content[int(answer.headers[HEADER]) :], "<f4"), vector("a", "cat")
    )


def test_pairs_for_a_reranker(client):
    path = "/v2/models/fake/reranker/infer"
    answer = infer(client, text("q", "one", "q", "two", shape=[2, 2]), path=path)
    assert (answer.json()["outputs"][0]["name"], answer.json()["outputs"][0]["shape"]) == ("logits", [2, 8])
    types = tensor("token_type_ids", [[0, 0, 1, 1]])
    tokens = tensor("input_ids", [[1, 5, 6, 2]]), tensor("attention_mask", [[0, 1, 1, 1]])
    assert infer(client, *tokens, types, path=path).status_code == 200
    pair, ids = (request.payload for request in client.engine.submitted)
    assert (pair.task, pair.num_texts, ids.type_ids, ids.lengths) == ("reranking", 2, b"\0\1\1", (3,))
    assert "allowed for fake/reranker is [n, 2]" in infer(client, text("q"), path=path).json()["error"]
    for name, value in (("dimensions", 3), ("normalize", True)):
        answer = infer(client, text("q", "one", shape=[1, 2]), path=path, parameters={name: value})
        assert (answer.status_code, f"{name} is for embeddings of texts" in answer.json()["error"]) == (400, True)


def test_parameters_reach_the_engine(client):
    parameters = {"priority": 3, "timeout": 5_000_000, "dimensions": 3, "normalize": False, "truncate": True}
    answer = infer(client, text("a cat"), parameters=parameters)
    assert answer.json()["outputs"][0]["shape"] == [1, 3]
    (request,) = client.engine.submitted
    assert (request.priority, request.payload.normalize) == ("low", False)
    assert 4.0 < request.deadline_s < 5.0
    infer(client, text("a"), parameters={"priority": 0, "timeout": 0})
    assert (client.engine.submitted[1].priority, client.engine.submitted[1].deadline_s) == ("normal", None)


@pytest.mark.parametrize(
    ("inputs", "body", "says"),
    [
        ([], {}, "inputs has no input_ids; send TEXT"),
        ([tensor("input_ids", [[1]])], {}, "inputs has no attention_mask"),
        ([text("a"), text("b")], {}, "input TEXT is there twice"),
        ([text("a"), tensor("input_ids", [[1]])], {}, "TEXT and token tensors"),
        ([text("a", name="text")], {}, "input 'text' is unknown. Did you mean 'TEXT'? The model has TEXT, input_ids, attention_mask"),
        ([text("a", datatype="FP32")], {}, "the datatype 'FP32'; allowed is BYTES"),
        ([text("a", shape=[2])], {}, "has 1 values; its shape [2] needs 2 values"),
        ([text("a", "b", shape=[1, 2])], {}, "allowed for fake-encoder is [n] or [n, 1]"),
        ([text(shape=[])], {}, "has the shape []"),
        ([text(shape=[10**30])], {}, "allowed are 1 to 8"),
        ([text("")], {}, "text 0 is empty"),
        ([text(5)], {}, "element 0 is 5; allowed are strings"),
        ([text(["a", "b"], shape=[1, 1])], {}, "lists of other lengths"),
        ([text("a", shape="x")], {}, "inputs[0].shape is 'x'; allowed is a list."),
        ([{"name": "TEXT", "shape": [1], "datatype": "BYTES"}], {}, "has no data"),
        ([text("a", parameters={"binary_data_size": 5})], {}, "data and binary_data_size"),
        ([text("a", parameters={"shared_memory_region": "x"})], {}, "neither shared memory"),
        ([tensor("input_ids", [[1.5]]), tensor("attention_mask", [[1]])], {}, "the value 1.5; allowed are integers"),
        ([tensor("input_ids", [[2**31]], "INT32"), tensor("attention_mask", [[1]])], {}, "allowed are integers of INT32"),
        ([tensor("input_ids", [[1, 1000]]), tensor("attention_mask", [[1, 1]])], {}, "the token id 1000"),
        ([tensor("input_ids", [[1]]), tensor("attention_mask", [[0]])], {}, "row 0 of attention_mask has no 1"),
        ([tensor("input_ids", [[1, 1, 1]]), tensor("attention_mask", [[1, 0, 1]])], {}, "a 0 between its 1s"),
        ([tensor("input_ids", [[1, 1]]), tensor("attention_mask", [[1]])], {}, "the same for input_ids, attention_mask"),
        ([text("a")], {"outputs": [{"name": "logits"}]}, "output 'logits' is unknown. The model has embedding"),
        ([text("a")], {"outputs": [{"name": "embedding", "parameters": {"classification": 2}}]}, "classification"),
        ([text("a")], {"parameters": {"priority": 4}}, "parameter priority is 4; allowed are integers from 0 to 3"),
        ([text("a")], {"parameters": {"normalize": 1}}, "parameter normalize is 1; allowed is true or false"),
    ],
)  # fmt: skip
def test_a_bad_request_says_what_is_wrong(client, inputs, body, says):
    answer = infer(client, *inputs, **body)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert says in answer.json()["error"]
    assert not client.engine.submitted


@pytest.mark.parametrize(
    ("header", "size", "says"),
    [
        ("9999", 5, "header Inference-Header-Content-Length is '9999'"),
        ("-1", 5, "Content-Length is '-1'"),
        (None, 6, "has binary_data_size 6; 5 bytes are left"),
        (None, 4, "its bytes; its shape needs 1"),
        (None, 3, "its 3 bytes end within element 0"),
        (None, -1, "has binary_data_size -1"),
        (None, True, "allowed is an integer"),
    ],
)
def test_wrong_lengths_of_binary_tensors(client, header, size, says):
    described = {"name": "TEXT", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    raw = packed("a") if size != 4 else b"\0\0\0\0"
    if size == 3:
        raw = b"\1\0\0"
    headers = None if header is None else {HEADER: header}
    answer = binary(client, {"inputs": [described]}, raw, headers=headers)
    assert answer.status_code == 400
    assert says in answer.json()["error"] or size == 4
    extra = binary(client, {"inputs": [text("a")]}, b"x")
    assert "the body has 1 bytes after its JSON" in extra.json()["error"]


def test_metadata_config_and_index(client):
    server = client.get("/v2").json()
    assert (server["name"], "binary_tensor_data" in server["extensions"]) == ("noria", True)
    described = client.get("/v2/models/fake-encoder").json()
    assert described == client.get("/v2/models/fake-encoder/versions/1").json() == {
        "name": "fake-encoder", "versions": ["1"], "platform": "noria",
        "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]},
                   {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
                   {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]}],
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 8]}],
    }  # fmt: skip
    assert client.get("/v2/models/noria").json() == described
    config = client.get("/v2/models/classifier/config").json()
    assert config["max_batch_size"] == 8
    assert config["input"][0] == {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1], "optional": True}
    assert config["output"] == [{"name": "logits", "data_type": "TYPE_FP32", "dims": [8]}]
    assert config["parameters"]["labels"]["string_value"] == '["a","b","c","d","e","f","g","h"]'
    index = client.post("/v2/repository/index").json()
    assert [each["name"] for each in index] == ["fake-encoder", "fake/reranker", "classifier"]
    assert index[0] == {"name": "fake-encoder", "version": "1", "state": "READY", "reason": ""}
    for body in ({"ready": True}, {"ready": None, "repository_name": "x"}):
        assert client.post("/v2/repository/index", json=body).json() == index


def test_health_needs_an_engine(client):
    paths = "/v2/health/live", "/v2/health/ready", "/v2/models/fake-encoder/ready"
    assert [client.get(path).status_code for path in paths] == [200, 200, 200]
    assert client.get("/v2/models/fake-encoder/versions/1/ready").json() == {"name": "fake-encoder", "ready": True}


def test_statistics_count_what_was_inferred(client):
    def statistics(path):
        (found,) = client.get(path).json()["model_stats"]
        return found

    path = "/v2/models/classifier/stats"
    before = statistics(path)
    infer(client, text("a", "b"), path="/v2/models/classifier/infer")
    infer(client, text(""), path="/v2/models/classifier/infer")
    after = statistics(path)
    assert after["inference_count"] - before["inference_count"] == 2
    for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"):
        assert after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"] == 1
    assert after["inference_stats"]["queue"]["ns"] - before["inference_stats"]["queue"]["ns"] == 1_000_000
    assert after["inference_stats"]["compute_infer"]["ns"] - before["inference_stats"]["compute_infer"]["ns"] == 2e6
    assert after in client.get("/v2/models/stats").json()["model_stats"]


def test_statistics_have_the_batches_of_each_size(client):
    metrics = EngineMetrics("engine-0", None, 8)  # those of an engine in this process: it has the same metrics
    for num_texts, seconds in ((2, 0.25), (2, 0.5), (1, 0.125), (130, 1.0)):
        rows = tuple(ItemId("a", number) for number in range(num_texts))
        plan = BatchPlan(0, BatchKey(0, 0, ModelKey("fake/reranker")), rows, (8,) * num_texts)
        ended = (None,) * num_texts
        metrics.on_batch(ExecutedBatch(FinishedBatch(plan, BatchResult(), seconds), ended, {}), 1)
    (found,) = client.get("/v2/models/fake/reranker/stats").json()["model_stats"]
    assert found["execution_count"] == 4
    assert [(each["batch_size"], each["compute_infer"]) for each in found["batch_stats"]] == [
        (1, {"count": 1, "ns": 125_000_000}),
        (2, {"count": 2, "ns": 750_000_000}),
        (192, {"count": 1, "ns": 1_000_000_000}),
    ]


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v2/models/other", 404, "model 'other' is not served here; allowed are 'fake-encoder'"),
        ("GET", "/v2/models/fake-encoder/versions/2/ready", 404, "no version '2'; its one version is '1'"),
        ("POST", "/v2/repository/models/fake-encoder/load", 501, "models are loaded by noria serve"),
        ("POST", "/v2/repository/models/fake/reranker/unload", 501, "models are loaded by noria serve"),
        ("GET", "/v2/shared", 404, "there is no '/v2/shared'"),
        ("PUT", INFER, 405, "PUT is not allowed"),
        ("POST", INFER, 400, "the body is empty"),
    ],
)
def test_errors_are_texts(client, method, path, status, says):
    answer = client.request(method, path)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert says in answer.json()["error"]


def test_an_engines_error(client):
    client.engine.failure = {"code": "queue_full", "message": "full", "retry_after_s": 2.5}
    answer = infer(client, text("a"))
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, {"error": "full"}, "3")
