"""Jobs on the whole server: whichever process is killed, each job ends once, with the same image."""

import contextlib
import signal
import sqlite3

import httpx
import psutil
import pytest

from noria.testing.server import running_server
from waiting import wait_until

# A server starts, stops, starts again, and generates twice: 36 s alone, 129 s beside three other test processes.
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


def kill_while_processing(server, client, data_dir):
    """Kill the front end and the engine while a job is processing; returns the job's id and its request.

    Both processes are suspended while the status is read. On a busy machine the job may have ended by then: try
    another.
    """
    for index in range(5):
        body = BODY | {"seed": BODY["seed"] + index}
        job_id = client.post("/v1/jobs", json={"input": body}).json()["id"]
        wait_for_a_step(client, job_id)
        children = [*server.children("frontend"), *server.children("engine")]
        for child in children:
            child.suspend()
        if status_of(data_dir, job_id) == "processing":
            for child in children:
                child.kill()
            return job_id, body
        for child in children:
            child.resume()
    raise AssertionError("each of five jobs ended before the processes could be suspended")


def status_of(data_dir, job_id):
    """Read from the database: the server is suspended."""
    with contextlib.closing(sqlite3.connect(f"file:{data_dir}/jobs.sqlite?mode=ro", uri=True)) as database:
        return database.execute("SELECT status FROM noria_jobs WHERE id = ?", (job_id,)).fetchone()[0]


def statuses(client, job_id):
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        lines = [line for line in events.iter_lines() if line.startswith("data: ") and '"status":' in line]
    return [line.partition('"status":"')[2].partition('"')[0] for line in lines]


@pytest.mark.slow  # kills both kinds of process of a server: 40 s; tests/jobs has every such loss without processes
def test_a_job_whose_front_end_and_engine_are_killed_succeeds_once_with_the_same_image(tmp_path):
    with running(tmp_path) as (server, client):
        job_id, body = kill_while_processing(server, client, tmp_path)
        done = wait_until_ended(client, job_id)
        assert (done["status"], done["error"]) == ("succeeded", None)
        seen = statuses(client, job_id)
        assert seen[:2] == ["starting", "processing"]
        assert seen.count("processing") >= 2
        assert [status for status in seen if status not in ("starting", "processing")] == ["succeeded"]
        assert client.get(done["output"][0]).content == client.post("/t2i", json=body).content
        files = sorted(path.name for path in (tmp_path / "results" / job_id).rglob("*.*"))
        assert len(files) == 1


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
