"""The width rule: whose rows are in a call, and how much of the device a key of images has."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.scheduling.shares.fair_width import add_image, count_clients, fair_counts, remove_image, split_by_shares
from noria.scheduling.step.batch_selection import BatchLimits, select_batch


@dataclasses.dataclass(frozen=True)
class Image:
    client: str
    number: int = 0
    rows: int = 1
    weight: float = 1.0
    deadline_s: float | None = None
    calls_left: float = 10


def line_s(rows):
    return 0.010 + 0.010 * rows


def images_of(client, number, **fields):
    return [Image(client, each, **fields) for each in range(number)]


def selected(images, rows_limit=16, step_s=line_s, width_slack=0.0):
    limits = BatchLimits(rows_limit, step_s, 0.0, 1.0, is_full=True, width_slack=width_slack)
    return select_batch(images, limits, 0.0, count_clients(images))[0]


def test_a_client_with_many_images_has_the_rows_that_slow_it_down_as_much_as_the_other():
    heap, small = images_of("heap", 16), images_of("small", 1)
    # Alone, 16 rows take 170 ms and one takes 20 ms: 94 and 50 rows a second, so 1.9 rows for one.
    assert selected([*small, *heap]) == [*small, *heap[:2]]
    assert selected([*heap, *small]) == [*heap[:2], *small]


def test_a_weight_multiplies_the_rows():
    heap, small = images_of("heap", 16, weight=3.0), images_of("small", 1)
    assert selected([*small, *heap]) == [*small, *heap[:6]]
    light = images_of("light", 1, weight=0.1)
    assert selected([*small, *light]) == small
    assert selected([*light, *small]) == [*light, *small]  # its turn is first


def test_rows_that_are_nearly_free_ride_beyond_the_shares():
    heap, small = images_of("heap", 16), images_of("small", 1)
    assert len(selected([*small, *heap], step_s=lambda rows: 0.014 * max(1, rows - 3))) == 4
    assert len(selected([*small, *heap], width_slack=0.25)) == 3  # with four, 40 ms would become 50 ms, and 20 alone
    others = [*small, *images_of("another", 1), *images_of("third", 1)]
    assert len(selected([*others, *heap], width_slack=0.25)) == 6  # 60 ms become 75 ms at most
    assert len(selected([*small, *heap], width_slack=math.inf)) == 16


def test_images_of_one_client_and_images_with_deadlines_are_not_held_back():
    heap = images_of("heap", 20)
    assert selected(heap) == heap[:16]
    urgent = images_of("heap", 5, deadline_s=60.0)
    assert selected([*urgent, *images_of("small", 1)]) == [*urgent, *images_of("small", 1)]


def test_clients_beyond_the_limit_wait_for_their_turn():
    images = [Image(str(number)) for number in range(20)]
    assert selected(images, rows_limit=4) == images[:4]


def test_without_measurements_all_step():
    images = [*images_of("heap", 3), *images_of("small", 1)]
    assert selected(images, step_s=lambda _rows: 0.0) == images


images_of_clients = st.lists(
    st.builds(
        Image,
        client=st.sampled_from("abcd"),
        number=st.integers(0, 10**6),
        rows=st.sampled_from([1, 2]),
        deadline_s=st.none() | st.just(60.0),
    ),
    min_size=1,
    max_size=24,
    unique_by=lambda image: image.number,
)


@given(images=images_of_clients, rows_limit=st.integers(2, 16), overhead=st.floats(0.0, 1.0))
def test_the_split_keeps_all_images_and_their_order_and_each_client_has_one_within(images, rows_limit, overhead):
    within, beyond, _ = split_by_shares(images, count_clients(images), rows_limit, lambda rows: overhead + rows)
    assert sorted([*within, *beyond], key=images.index) == images
    assert within == sorted(within, key=images.index)
    assert beyond == sorted(beyond, key=images.index)
    is_full = sum(image.rows for image in within) >= rows_limit
    assert is_full or {image.client for image in within} == {image.client for image in images}


def test_keys_have_the_shares_of_the_clients_of_their_images():
    heap, small = images_of("heap", 15), images_of("small", 1)

    def counts(*images):
        return fair_counts([count_clients(each) for each in images])

    assert counts(heap, small) == pytest.approx([8.0, 8.0])
    assert counts([*heap[:5], *small], heap[5:]) == pytest.approx([8 / 3 + 8, 16 / 3])
    assert counts(heap, images_of("heap", 3)) == [15, 3]


@given(images=images_of_clients, num_left=st.integers(0, 24))
def test_clients_are_counted_one_image_at_a_time(images, num_left):
    ready = count_clients(images)
    for image in images[num_left:]:
        remove_image(ready, image)
    assert ready == count_clients(images[:num_left])
    for image in images[num_left:]:
        add_image(ready, image)
    assert ready == count_clients(images)
