"""Work moves from busy engines to others, however many clients decide, each for its own requests."""

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.scheduling.cluster.rebalancer import EngineWork, results_to_move

RESULT_S, TICK_S, STAY_S = 1.0, 0.5, 10.0


@dataclass(eq=False)
class Result:
    client: int
    left_s: float = RESULT_S
    moved_at: float = -math.inf
    num_moves: int = 0


def simulate(num_results, num_clients, ready_s):
    """Engines that work on results, each of a client, in virtual time; all clients decide at once, once a second.

    Returns when all results were done, and how often each has moved.
    """
    rng = random.Random(1)
    queues = [[Result(rng.randrange(num_clients)) for _ in range(num)] for num in num_results]
    results = [result for queue in queues for result in queue]
    tick = 0
    while any(queues):
        now = tick * TICK_S
        present = [queue for queue, ready in zip(queues, ready_s, strict=True) if now >= ready]
        if tick % 2 == 0:
            reported_s = [sum(each.left_s for each in queue) for queue in present]
            for client in range(num_clients):
                move_own(present, list(reported_s), client, now)
        for queue in present:
            left_s = TICK_S
            while queue and left_s > 0.0:
                done_s = min(left_s, queue[0].left_s)
                queue[0].left_s -= done_s
                left_s -= done_s
                if queue[0].left_s <= 0.0:
                    queue.pop(0)
        tick += 1
    return tick * TICK_S, [each.num_moves for each in results]


def move_own(queues, backlogs_s, client, now):
    """Move what a client should move, to the engine that has least as far as it knows."""
    movable = [[each for each in queue if each.client == client and now - each.moved_at >= STAY_S] for queue in queues]
    work = [EngineWork(seconds, len(own)) for seconds, own in zip(backlogs_s, movable, strict=True)]
    for queue, own, num in zip(queues, movable, results_to_move(work), strict=True):
        for result in own[::-1][:num]:
            queue.remove(result)
            target = backlogs_s.index(min(backlogs_s))
            queues[target].append(result)
            backlogs_s[target] += RESULT_S
            result.moved_at, result.num_moves = now, result.num_moves + 1


@pytest.mark.parametrize("num_clients", [1, 3, 8])
@pytest.mark.parametrize(
    ("num_results", "ready_s", "done_within_s"),
    [
        ([40, 0], [0.0, 2.0], 24.0),  # an engine starts while another one has 40 s of work: 21 s would be ideal
        ([40, 0, 0, 0], [0.0, 2.0, 2.0, 2.0], 16.0),  # three start: 11.5 s
        ([20] * 8 + [0], [0.0] * 8 + [2.0], 20.0),  # one starts beside eight: 18 s
    ],
)
def test_work_moves_to_engines_that_start_and_nothing_moves_twice(num_results, ready_s, done_within_s, num_clients):
    done_s, num_moves = simulate(num_results, num_clients, ready_s)
    assert done_s <= done_within_s
    assert max(num_moves) == 1


@given(st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4), min_size=2, max_size=6), st.integers(1, 4))
def test_clients_that_decide_at_once_do_not_move_more_than_the_excess(num_results, num_clients):
    """`num_results` of each engine by client."""
    backlogs_s = [RESULT_S * sum(of_engine[:num_clients]) for of_engine in num_results]
    moved = [0] * len(num_results)
    for client in range(num_clients):
        of_client = results_to_move(
            [EngineWork(s, of_engine[client]) for s, of_engine in zip(backlogs_s, num_results, strict=True)]
        )
        assert all(num <= of_engine[client] for num, of_engine in zip(of_client, num_results, strict=True))
        moved = [a + b for a, b in zip(moved, of_client, strict=True)]
    mean_s = sum(backlogs_s) / len(backlogs_s)
    assert RESULT_S * sum(moved) <= sum(max(s - mean_s, 0.0) for s in backlogs_s)


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([EngineWork(20.0, 10), EngineWork(0.0, 0)], [3, 0]),  # half of what balances them
        ([EngineWork(20.0, 2), EngineWork(0.0, 0)], [1, 0]),
        ([EngineWork(20.0, 1), EngineWork(0.0, 0)], [0, 0]),  # it would only change places
        ([EngineWork(4.9, 10), EngineWork(0.0, 0)], [0, 0]),
        ([EngineWork(20.0, 10, call_s=5.0), EngineWork(0.0, 0)], [0, 0]),
        ([EngineWork(20.0, 10), EngineWork(10.1, 5)], [0, 0]),
        ([EngineWork(20.0, 0), EngineWork(0.0, 0)], [0, 0]),  # all are other clients'
        ([EngineWork(20.0, 10), EngineWork(40.0, 10), EngineWork(0.0, 0)], [0, 3, 0]),
    ],
)
def test_only_a_large_excess_moves(engines, expected):
    assert results_to_move(engines) == expected
