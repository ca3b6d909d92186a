"""The queue against a sorted list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.scheduling.step.active_request import ActiveRequest
from noria.scheduling.step.waiting_queue import WaitingQueue
from noria.scheduling.types import BatchKey, ItemId, SchedulableRequest


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
    queue, actives = WaitingQueue(), []
    for number, key in enumerate(keys * num_copies):
        active = make_active(f"r{number}", 1 + number % 3, float(key))
        queue.add(active, is_first=number % 5 == 0)
        del queue.unranked[f"r{number}"]
        queue.insert(active, [(index, key + 2.0 * index) for index in active.waiting])
        actives.append(active)
    for active in data.draw(st.lists(st.sampled_from(actives), unique=True, max_size=20)):
        queue.remove(active)
    for active in data.draw(st.lists(st.sampled_from(actives), unique=True, max_size=20)):
        queue.remove_image(active, 0)
    expected = sorted(
        (rank, ItemId(active.request.attempt_id, index), active)
        for active in actives
        for index, rank in active.ranks.items()
    )
    assert [(each.rank, each.image, each.active) for each in queue] == expected
    work_s = 0.0
    for num_images, (rank, _, active) in enumerate(expected):
        assert queue.ahead_of(rank) == (num_images, work_s)
        work_s += active.image_work_s
    refreshed = [each.rank for _ in expected for each in queue.next_to_refresh(7)]
    assert set(refreshed) == {rank for rank, _, _ in expected}
