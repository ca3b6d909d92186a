"""The queue against a sorted list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.scheduling.step.active_request import ActiveRequest
from noria.scheduling.step.waiting_queue import WaitingQueue
from noria.scheduling.types import BatchKey, SchedulableRequest


def make_active(name, num_images, work_s):
    request = SchedulableRequest(name, BatchKey(64, 64), num_images, 5, None)
    active = ActiveRequest(request, 0.0, set(), needs_encode=False, waiting=list(range(num_images)))
    active.image_work_s = work_s
    return active


@settings(max_examples=30, deadline=None)
@given(
    keys=st.lists(st.integers(0, 20), min_size=1, max_size=40),
    num_copies=st.integers(1, 8),  # so that there are several blocks
    data=st.data(),
)
def test_it_is_sorted_and_sums_what_is_ahead(keys, num_copies, data):
    queue, expected = WaitingQueue(), []
    for number, key in enumerate(keys * num_copies):
        active = make_active(f"r{number}", 1 + number % 3, float(key))
        queue.add(active, is_first=number % 5 == 0)
        del queue.unranked[f"r{number}"]
        queue.insert(active, key)
        expected.append(active)
    for active in data.draw(st.lists(st.sampled_from(expected), unique=True, max_size=20)):
        queue.remove(active)
        expected.remove(active)
    expected.sort(key=lambda active: active.rank)
    assert list(queue) == expected
    num_images = work_s = 0
    for active in expected:
        assert queue.ahead_of(active) == (num_images, work_s)
        num_images += len(active.waiting)
        work_s += len(active.waiting) * active.image_work_s
    refreshed = [active for _ in expected for active in queue.next_to_refresh(7)]
    assert {id(active) for active in refreshed} == {id(active) for active in expected}
