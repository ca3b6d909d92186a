"""Batch selection: as many images as pay off and, while slots are free, their deadlines allow."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.scheduling.step.batch_selection import BatchLimits, all_fit, select_batch

# One second, plus a quarter for each further row: a batch of 8 takes 2.75 s, which is 2.9 rows per second; one row
# alone is 1.
LIMITS = BatchLimits(rows_limit=8, step_s=lambda rows: 0.75 + 0.25 * rows, decode_s=0.5, share=1.0, is_full=False)


@dataclasses.dataclass
class Image:
    name: str
    calls_left: float = 10
    deadline_s: float | None = None
    rows: int = 1
    client: str = ""
    weight: float = 1.0


def names(images, now=0.0, **limits):
    return [image.name for image in select_batch(images, dataclasses.replace(LIMITS, **limits), now)[0]]


def test_all_images_that_pay_off_are_selected():
    images = [Image(str(number)) for number in range(10)]
    assert names(images) == list("01234567")
    assert names(images, rows_limit=3) == list("012")
    assert names([], rows_limit=3) == []
    assert [all_fit(rows, 8, None, is_full=True) for rows in (8, 9)] == [True, False]
    assert not all_fit(1, 8, None, is_full=False)  # a deadline may keep the batch small


def test_the_first_image_is_always_selected():
    assert names([Image("two", rows=2), Image("one")], rows_limit=1) == ["two"]


def test_a_later_image_that_fits_takes_rows_that_are_too_few_for_the_next():
    assert names([Image("a", rows=2), Image("b", rows=2), Image("c"), Image("d")], rows_limit=3) == ["a", "c"]


def test_a_deadline_keeps_the_batch_small():
    # 10 calls in 15.5 s less 0.5 s of decoding: 1.5 s each, nine tenths of which may be used: 3 rows take 1.5 s, 2 take
    # 1.25 s.
    urgent = Image("urgent", deadline_s=15.5)
    patient = [Image(str(number)) for number in range(5)]
    assert names([urgent, *patient]) == ["urgent", "0"]
    assert names([urgent, *patient], now=-5.0) == ["urgent", "0", "1", "2"]


def test_a_smaller_share_of_the_device_allows_fewer_images():
    images = [Image("urgent", deadline_s=25.5), *[Image(str(number)) for number in range(5)]]
    assert names(images) == ["urgent", "0", "1", "2", "3", "4"]
    assert names(images, share=0.5) == ["urgent"]


def test_deadlines_are_ignored_when_all_slots_are_taken():
    images = [Image("urgent", deadline_s=15.5), *[Image(str(number)) for number in range(5)]]
    assert len(names(images, is_full=True)) == 6


def test_an_image_that_cannot_meet_its_deadline_does_not_limit_the_batch():
    images = [Image("hopeless", deadline_s=5.0), *[Image(str(number)) for number in range(5)]]
    assert len(names(images)) == 6
    assert len(names([Image("denoised", calls_left=0, deadline_s=5.0), *images[1:]])) == 6


def test_each_selected_image_limits_the_step_for_later_images():
    images = [Image("a"), Image("tight", deadline_s=14.5), Image("b"), Image("c")]
    chosen, max_step_s = select_batch(images, LIMITS, 0.0)
    assert [image.name for image in chosen] == ["a", "tight"]
    assert max_step_s == pytest.approx(0.9 * 1.4)


@given(
    st.lists(
        st.builds(
            Image, st.text("abc", max_size=3), st.integers(0, 50), st.none() | st.floats(0, 100), st.integers(1, 2)
        ),
        max_size=12,
    ),
    st.floats(0, 100),
    st.integers(1, 12),
)
def test_a_batch_fits_the_row_limit_and_the_deadlines(images, now, limit):
    limits = dataclasses.replace(LIMITS, rows_limit=limit)
    chosen, _ = select_batch(images, limits, now)
    assert bool(chosen) == bool(images)
    # in order, without duplicates
    assert [image for image in images if any(image is each for each in chosen)] == chosen
    rows = sum(image.rows for image in chosen)
    assert len(chosen) <= 1 or rows <= limit
    for image in chosen[:-1]:  # those selected before the last one can afford the whole batch
        if image.deadline_s is not None and image.calls_left > 0:
            each_s = (image.deadline_s - now - limits.decode_s) / image.calls_left
            assert each_s < limits.step_s(image.rows) or limits.step_s(rows) <= each_s
