"""A queue of jobs for all keys: the 17 jobs of one once made another's only job a 429."""

from frontend.conftest import folder, new_engine  # noqa: F401 - fixtures
from hostile.jobs_server import post_job, serving_jobs
from waiting import wait_until


def test_one_key_cannot_fill_the_queue_of_another(new_engine, tmp_path):  # noqa: F811
    with serving_jobs(new_engine, tmp_path, max_queued=16, concurrency=1) as (mallory, alice, engine):
        post_job(mallory)
        wait_until(lambda: engine.submitted)  # the one that runs; all others wait
        answers = [post_job(mallory) for _ in range(20)]
        assert [answer.status_code for answer in answers] == [202] * 4 + [429] * 16
        assert answers[-1].json()["error"]["code"] == "rate_limited"
        assert int(answers[-1].headers["retry-after"]) > 0
        assert post_job(alice).status_code == 202


def test_keys_take_turns_however_many_jobs_one_has_queued(new_engine, tmp_path):  # noqa: F811
    with serving_jobs(new_engine, tmp_path, concurrency=1) as (mallory, alice, engine):
        mallorys = [post_job(mallory, priority="high").json()["id"] for _ in range(12)]
        wait_until(lambda: engine.submitted)
        alices = [post_job(alice).json()["id"] for _ in range(3)]
        for number in range(1, 8):
            wait_until(lambda number=number: len(engine.submitted) == number)
            (mallory if engine.submitted[-1].request_id in mallorys else alice).delete(
                f"/v1/jobs/{engine.submitted[-1].request_id}"
            )
        owners = ["alice" if request.request_id in alices else "mallory" for request in engine.submitted[:7]]
        assert owners == ["mallory", "alice"] * 3 + ["mallory"]
