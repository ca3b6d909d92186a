"""The codec of the Open Inference Protocol: what it accepts is what was sent, and it rejects the rest by its own errors."""

import json
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import FrontendConfig
from noria.errors import InvalidField, RequestError
from noria.frontend.protocols.open_inference.inference import InferenceRequest, as_settings, outputs_of
from noria.frontend.protocols.open_inference.rest_body import parse, serialize
from noria.frontend.protocols.open_inference.tensors import InputTensor, OutputTensor, integers_of, texts_of
from noria.frontend.services.texts.encoding_result import EncodingResult, EncodingTimings
from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.observe.logs.request_log import RequestLogRecord
from noria.testing.fake_encoder import FAKE_ENCODER

CONFIG = FrontendConfig(max_texts=4)
WITH_TYPES = msgspec.structs.replace(FAKE_ENCODER, inputs=("input_ids", "attention_mask", "token_type_ids"))


def packed(texts):
    return b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in texts)


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_texts_in_every_form_are_the_same(texts):
    shape = (len(texts), 1)
    for data in (packed(texts), memoryview(packed(texts)), texts, [[each] for each in texts]):
        assert texts_of(InputTensor("TEXT", "BYTES", shape, data)) == texts


@given(st.data())
def test_integers_in_every_form_are_the_same(data):
    datatype, dtype = data.draw(st.sampled_from([("INT32", "<i4"), ("INT64", "<i8")]))
    bounds, columns = np.iinfo(dtype), data.draw(st.integers(1, 3))
    row = st.lists(st.integers(int(bounds.min), int(bounds.max)), min_size=columns, max_size=columns)
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    shape = (len(rows), columns)
    for sent in (np.array(rows, dtype).tobytes(), [value for each in rows for value in each], rows):
        np.testing.assert_array_equal(integers_of(InputTensor("input_ids", datatype, shape, sent)), rows)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
shapes = st.lists(st.integers(-2, 5) | st.sampled_from([2**31, 2**63, 10**30]), max_size=3).map(tuple)
tensors = st.builds(
    InputTensor,
    st.sampled_from(["TEXT", "input_ids", "attention_mask", "token_type_ids", "other", ""]),
    st.sampled_from(["BYTES", "INT32", "INT64", "FP32", "x"]),
    shapes,
    st.binary(max_size=40) | st.lists(scalars | st.lists(scalars, max_size=5), max_size=5),
)
ids = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=2), min_size=1, max_size=5)
token_tensors = ids.flatmap(
    lambda rows: st.tuples(
        *(
            st.builds(InputTensor, st.just(name), st.just("INT64"), st.just((len(rows), 2)), st.just(rows))
            for name in ("input_ids", "attention_mask", "token_type_ids")
        )
    )
)
requests = st.builds(
    InferenceRequest,
    st.lists(tensors, max_size=3) | token_tensors,
    st.lists(st.sampled_from(["embedding", "logits"]), max_size=2),
    st.dictionaries(st.sampled_from(["priority", "timeout", "dimensions", "normalize", "prompt_name", "x"]), scalars),
)


@given(requests)
def test_a_request_is_rejected_or_has_as_many_texts_as_rows(request):
    try:
        settings = as_settings(request, WITH_TYPES, CONFIG)
    except InvalidField:
        return
    assert settings.num_texts == request.inputs[0].shape[0] <= CONFIG.max_texts
    assert all(settings.token_ids) and [len(each) for each in settings.type_ids or settings.token_ids] == [
        len(each) for each in settings.token_ids
    ]


bodies = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(
            st.fixed_dictionaries(
                {"name": st.just("TEXT"), "shape": st.just([1]), "datatype": st.just("BYTES")},
                optional={
                    "data": st.just(["a"]),
                    "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "x"]), scalars.filter(lambda each: not isinstance(each, bytes))),
                },
            ),
            max_size=2,
        ),
        "parameters": st.dictionaries(st.just("binary_data_output"), st.booleans() | st.none()),
    },
)  # fmt: skip


@given(bodies, st.binary(max_size=12), st.none() | st.integers(-3, 400) | st.text(max_size=4))
def test_a_body_is_rejected_or_all_of_it_is_used(body, binary, length):
    content = json.dumps(body).encode()
    if isinstance(length, int) and length >= 200:
        length = len(content)  # else it would hardly ever be right
    try:
        request = parse(content + binary, None if length is None else str(length)).inference
    except RequestError:
        return
    if length == 0:
        assert request.inputs[0].data == [content + binary]
    else:
        used = [each.data for each in request.inputs if isinstance(each.data, memoryview)]
        assert b"".join(used) == binary


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_break_the_codec(raw):
    for length in (None, "0", str(len(raw) // 2)):
        with pytest.raises(RequestError) if length != "0" else pytest.MonkeyPatch.context():
            parse(raw, length)
    for read, datatype in ((texts_of, "BYTES"), (integers_of, "INT32")):
        try:
            assert len(read(InputTensor("x", datatype, (3,), raw))) == 3
        except InvalidField:
            assert datatype == "BYTES" or len(raw) != 12


def test_outputs_of_a_model_that_classifies_tokens_are_padded():
    spec = msgspec.structs.replace(FAKE_ENCODER, task="token_classification", dimensions=2, labels=("a", "b"))
    numbers = memoryview(np.arange(1, 9, dtype=np.float32)).cast("B").cast("f")
    texts = [TokenizedText(1, b""), TokenizedText(3, b"")]
    result = EncodingResult(spec, numbers, 4, 2, texts, 4, 0, EncodingTimings(0, 0, 0, 0, 0), 1.0, RequestLogRecord())
    logits, num_tokens = outputs_of(result)
    assert logits.values.tolist() == [[[1, 2], [0, 0], [0, 0]], [[3, 4], [5, 6], [7, 8]]]
    assert (num_tokens.datatype, num_tokens.values.tolist()) == ("INT32", [1, 3])
    assert [each.name for each in outputs_of(result, ["num_tokens"])] == ["num_tokens"]


def test_a_response_may_have_outputs_of_both_forms():
    outputs = [OutputTensor("a", np.float32([[1, 2]])), OutputTensor("b", np.int32([3]))]
    body = {"inputs": [], "outputs": [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}]}
    content, length = serialize(parse(json.dumps(body).encode(), None), "m", "1", outputs)
    assert content[length:] == np.float32([1, 2]).tobytes()
    first, second = json.loads(content[:length])["outputs"]
    assert first == {"name": "a", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    assert second == {"name": "b", "datatype": "INT32", "shape": [1], "data": [3]}
