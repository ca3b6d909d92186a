"""The encoder executor with sessions that compute vectors of token ids."""

import queue

import numpy as np
import pytest
from msgspec.structs import replace

from noria.engine.encoder.executor import EncoderExecutor
from noria.engine.encoder.request import prepare
from noria.errors import InvalidField
from noria.models.encoder.tokenizers.token_rows import ImageRow, TokenRow
from noria.protocol.text import EncoderModelSpec, Patches, TextResult
from noria.scheduling.types import BatchPlan, ItemId
from noria.testing.fake_encoder import FAKE_ENCODER, IMAGES, FakeSession, fake_vector, make_text_request
from waiting import TIMEOUT_S

TEXTS = ([1, 7, 2], [1, 8, 9, 10, 2], [1, 2])


def unit(vector):
    return vector / np.linalg.norm(vector)


def values(prepared):
    result, data = prepared.final_result()
    return np.frombuffer(data, "<f4").reshape(result.num_rows, result.num_columns)


class Harness:
    """An executor and the batches that it has finished."""

    def __init__(self, *sessions, spec=FAKE_ENCODER):
        self.spec, self.done = spec, queue.SimpleQueue()
        self.executor = EncoderExecutor({spec.key: (spec, sessions or [FakeSession(spec=spec)])})

    def run(self, *requests, rows=None, session=0):
        prepared = [prepare(request, self.spec) for request in requests]
        for each in prepared:
            self.executor.accept(each)
        rows = rows or [ItemId(r.attempt_id, index) for r in requests for index in range(r.payload.num_texts)]
        lengths = {r.attempt_id: r.payload.lengths for r in requests}
        plan = BatchPlan(
            session, prepared[0].batch_key, tuple(rows), tuple(lengths[row.attempt_id][row.index] for row in rows)
        )
        self.executor.start(plan, self.done.put)
        return prepared

    def result(self):
        return self.done.get(timeout=TIMEOUT_S).result


@pytest.fixture
def new_harness():
    made = []

    def make(*sessions, **options):
        made.append(Harness(*sessions, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.executor.close()


def test_every_text_gets_its_own_vector_in_the_requests_order(new_harness):
    harness = new_harness()
    requests = make_text_request("a", TEXTS[0], TEXTS[1]), make_text_request("b", TEXTS[2])
    rows = [ItemId("b", 0), ItemId("a", 1), ItemId("a", 0)]
    a, b = harness.run(*requests, rows=rows)
    assert not harness.result().failed
    np.testing.assert_allclose(values(a), [unit(fake_vector(TEXTS[0])), unit(fake_vector(TEXTS[1]))], rtol=1e-6)
    np.testing.assert_allclose(values(b), [unit(fake_vector(TEXTS[2]))], rtol=1e-6)


def test_vectors_are_cut_and_normalized_as_their_request_asks(new_harness):
    harness = new_harness()
    plain, cut = harness.run(
        make_text_request("a", TEXTS[0], normalize=False), make_text_request("b", TEXTS[0], dimensions=3)
    )
    harness.result()
    np.testing.assert_array_equal(values(plain), [fake_vector(TEXTS[0])])
    np.testing.assert_allclose(values(cut), [unit(fake_vector(TEXTS[0])[:3])], rtol=1e-6)


def test_classified_tokens_have_a_row_each(new_harness):
    spec = replace(FAKE_ENCODER, task="token_classification", dimensions=3, labels=("a", "b", "c"))
    harness = new_harness(spec=spec)
    (prepared,) = harness.run(make_text_request("a", *TEXTS[:2], model=spec))
    harness.result()
    assert prepared.final_result()[0] == TextResult(8, 3)
    np.testing.assert_array_equal(values(prepared)[4], fake_vector([8], 3))


class PanicError(BaseException):
    """An error such as a panic in Rust: it is no Exception."""


@pytest.mark.parametrize("error", [RuntimeError, PanicError])
def test_a_text_that_fails_does_not_fail_its_batch(new_harness, error):
    def fail_on_9(rows):
        if any(9 in row.ids for row in rows):
            raise error("9 is not liked\nmore")

    harness = new_harness(session := FakeSession(fail_on_9))
    prepared = harness.run(*(make_text_request(f"r{index}", text) for index, text in enumerate(TEXTS)))
    assert harness.result().failed == {ItemId("r1", 0): "the model failed: 9 is not liked"}
    assert session.batch_sizes == [3, 1, 1, 1]
    np.testing.assert_allclose(values(prepared[2]), [unit(fake_vector(TEXTS[2]))], rtol=1e-6)


def test_a_result_that_is_not_finite_fails_its_text_only(new_harness):
    class Broken(FakeSession):
        def run(self, rows, is_alone):
            return [each * (np.nan if 9 in row.ids else 1) for each, row in zip(super().run(rows), rows, strict=True)]

    harness = new_harness(Broken())
    harness.run(*(make_text_request(f"r{index}", text) for index, text in enumerate(TEXTS)))
    assert list(harness.result().failed) == [ItemId("r1", 0)]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to"), RuntimeError("Failed to allocate 4 B")]
)
def test_a_batch_without_memory_is_reported(new_harness, caplog, error):
    def fail(rows):
        raise error

    harness = new_harness(FakeSession(fail))
    harness.run(make_text_request("a", TEXTS[0]))
    assert not harness.result().fits
    assert caplog.records[-1].noria_fields == {"event": "out_of_memory", "num_texts": 1, "request_ids": ["a"]}


def test_a_request_may_end_while_its_batch_runs(new_harness):
    harness = new_harness()
    harness.run(make_text_request("a", TEXTS[0]))
    harness.executor.forget("a")
    assert not harness.result().failed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": ()}, "do not match"),
        ({"lengths": (2,)}, "do not match"),
        ({"lengths": (3, 0)}, "do not match"),
        ({"type_ids": b"0"}, "do not match"),
        ({"token_ids": np.array([1, 1000, 2], "<u2").tobytes()}, "a token id is 1000"),
        ({"token_ids": np.ones(65, "<u2").tobytes(), "lengths": (65,)}, "65 tokens; fake-encoder takes at most 64"),
        ({"dimensions": 9}, "allowed are 1 to 8"),
    ],
)
def test_a_request_that_no_model_can_take_is_rejected(changes, says):
    with pytest.raises(InvalidField, match=says):
        prepare(make_text_request("a", [1, 7, 2], **changes), FAKE_ENCODER)


def test_ids_of_four_bytes_and_types_of_pairs(new_harness):
    spec: EncoderModelSpec = replace(FAKE_ENCODER, vocab_size=250_000)
    ids = np.array([1, 70_000, 2], "<u4")
    prepared = prepare(
        make_text_request("a", [1, 1, 1], model=spec, token_ids=ids.tobytes(), id_bytes=4, type_ids=b"\0\0\1"), spec
    )
    assert prepared.rows[0].ids.tolist() == [1, 70_000, 2]
    assert prepared.rows[0].type_ids.tolist() == [0, 0, 1]


def test_images_are_rows_at_their_places() -> None:
    pixels = np.arange(96, dtype=np.uint8)
    request = make_text_request("a", [1, 2], model=IMAGES, lengths=(5, 2, 5), num_texts=3, image_places=(0, 2))
    first, text, second = prepare(request, IMAGES, memoryview(pixels)).rows
    assert isinstance(first, ImageRow) and isinstance(second, ImageRow) and isinstance(text, TokenRow)
    np.testing.assert_array_equal(np.concatenate([first.pixels, second.pixels]).ravel(), pixels)
    assert text.ids.tolist() == [1, 2]


ANY_SHAPE = replace(IMAGES, image_input=replace(IMAGES.image_input, side_px=0, patches=Patches(2, 3)))


@pytest.mark.parametrize(
    ("model", "places", "num_bytes", "says"),
    [
        (FAKE_ENCODER, (0, 2), 96, "there are images, and fake-encoder takes texts alone"),
        (FAKE_ENCODER, (), 96, "there are images, and fake-encoder takes texts alone"),
        (IMAGES, (0, 2), 95, "the 2 images have 95 bytes; clip expects 96"),
        (IMAGES, (0, 3), 96, "do not match the lengths"),
        (IMAGES, (0,), 48, "do not match the lengths"),
        (ANY_SHAPE, (0, 2), 80, "an image has 0 × 0 patches; at most 3 are allowed"),
    ],
)
def test_images_that_do_not_fit_the_model_are_rejected(
    model: EncoderModelSpec, places: tuple[int, ...], num_bytes: int, says: str
) -> None:
    lengths = (5, 2, 5) if places else (2,)
    request = make_text_request("a", [1, 2], model=model, lengths=lengths, num_texts=len(lengths), image_places=places)
    with pytest.raises(InvalidField, match=says):
        prepare(request, model, memoryview(bytes(num_bytes)))
