"""Jobs on the whole server: a job survives its server, with the same image. tests/chaos kills processes of one."""

import contextlib
import signal
import sqlite3

import httpx
import psutil
import pytest

from noria.testing.server import running_server
from waiting import wait_until

# A server starts, stops, starts again, and generates twice.
pytestmark = pytest.mark.timeout(900)

# Takes some seconds on two cores: enough time to kill a process meanwhile.
BODY = {"prompt": "a red circle above a blue square", "seed": 21, "inference_steps": 150}


@contextlib.contextmanager
def running(data_dir):
    arguments = ["bundled", "--slots", "4", "--data-dir", str(data_dir)]
    with (
        running_server(arguments) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client,
    ):
        yield server, client


def wait_until_ended(client, job_id):
    """The job, once it has ended. Ignores connection errors: the front end may be restarting."""

    def has_ended():
        with contextlib.suppress(httpx.TransportError):
            answer = client.get(f"/v1/jobs/{job_id}")
            return answer.is_success and (now := answer.json())["completed_at"] and now

    return wait_until(has_ended, 240)


def wait_for_a_step(client, job_id):
    """Wait until the job's images have made a step."""
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        for line in events.iter_lines():
            if line.startswith("data: ") and '"step":' in line and '"step":0' not in line:
                return
    raise AssertionError("the job ended before its first step was seen")


def status_of(data_dir, job_id):
    """Read from the database: the server is suspended."""
    with contextlib.closing(sqlite3.connect(f"file:{data_dir}/jobs.sqlite?mode=ro", uri=True)) as database:
        return database.execute("SELECT status FROM noria_jobs WHERE id = ?", (job_id,)).fetchone()[0]


def statuses(client, job_id):
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        lines = [line for line in events.iter_lines() if line.startswith("data: ") and '"status":' in line]
    return [line.partition('"status":"')[2].partition('"')[0] for line in lines]


@pytest.mark.slow  # starts a server twice
def test_a_job_survives_the_server_that_accepted_it(tmp_path):
    with running(tmp_path) as (server, client):
        job_id = client.post("/v1/jobs", json={"input": BODY}).json()["id"]
        wait_for_a_step(client, job_id)
        processes = [server.process, *server.process.children()]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with running(tmp_path) as (_, client):
        done = wait_until_ended(client, job_id)
        assert done["status"] == "succeeded"
        image = client.get(f"/v1/jobs/{job_id}/images/0").content
        assert image == client.post("/t2i", json=BODY).content


@pytest.mark.slow  # starts a server twice
def test_a_server_that_is_stopped_by_signals_to_all_processes_requeues_its_jobs_at_once(tmp_path):
    with running(tmp_path) as (server, client):
        job_id = client.post("/v1/jobs", json={"input": BODY}).json()["id"]
        wait_for_a_step(client, job_id)
        for process in (*server.process.children(), server.process):
            process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        assert status_of(tmp_path, job_id) in ("starting", "succeeded")
    with running(tmp_path) as (server, client):  # the leases of the first server would last 15 s
        done = wait_until_ended(client, job_id)
        assert done["status"] == "succeeded"
        assert "processing" in statuses(client, job_id)
        assert server.process.is_running()
