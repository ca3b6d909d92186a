"""Keys take turns when jobs are claimed."""

from hypothesis import given
from hypothesis import strategies as st

from noria.jobs.database.turns import QueuedJob, Turns


def queued(made_by, number=0):
    return QueuedJob(float(number), number, f"{made_by}{number}", made_by, "starting", 0, 0)


def keys(jobs):
    return "".join(job.made_by for job in jobs)


def test_jobs_of_one_key_are_taken_in_order():
    jobs = [queued("", number) for number in (3, 1, 2)]
    assert [job.seq for job in Turns().take(jobs, {}, 2)] == [1, 2]


def test_a_key_with_fewer_running_jobs_comes_first():
    jobs = [queued("a", 1), queued("a", 2), queued("a", 3), queued("b", 9), queued("b", 10)]
    assert keys(Turns().take(jobs, {"a": 1}, 9)) == "babaa"


def test_turns_are_remembered_where_one_job_runs_at_a_time():
    turns = Turns()
    jobs = [queued("a", number) for number in range(5)] + [queued("b", 8), queued("b", 9), queued("c", 10)]
    order = ""
    while jobs:
        (job,) = turns.take(jobs, {}, 1)
        jobs.remove(job)
        order += job.made_by
    assert order == "abcabaaa"


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), st.integers(1, 12))
def test_the_shares_of_keys_that_have_enough_jobs_differ_by_one_at_most(numbers, limit):
    jobs = [queued(key, number) for key, size in numbers.items() for number in range(size)]
    taken = keys(Turns().take(jobs, {}, limit))
    assert len(taken) == min(limit, sum(numbers.values()))
    shares = [taken.count(key) for key, size in numbers.items() if taken.count(key) < size]
    assert not shares or max(taken.count(key) for key in numbers) <= min(shares) + 1
