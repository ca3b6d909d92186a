"""kill -9 at random times of every process but the supervisor, under load: clients get an undisturbed server's images.

`make chaos` runs ten minutes with 300 kills and writes a report; CHAOS_KILLS, CHAOS_SECONDS, CHAOS_SEED and
CHAOS_REPORT (a file) change that. One minute is in the slow suite.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from users import JobCreator, User, all_jobs, undisturbed

from noria_bench.measurement.provenance import collect_provenance
from noria_bench.soak.killer import Killer, ReadinessMonitor
from waiting import wait_until

NUM_USERS, NUM_JOB_CREATORS, NUM_OPEN_JOBS = 3, 2, 4


@pytest.fixture
def folder(tmp_path):
    path = pathlib.Path("/tmp") / f"chaos-{os.getpid()}-{tmp_path.name[-8:]}"  # short enough for sockets' names
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


@contextlib.contextmanager
def serving(folder):
    """A server of two front ends and one engine with one padded bucket, so that no batch changes a bit of an image."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "noria", "serve", "bundled", "--port", str(port), "--processes", "2"]
    command += ["--slots", "4", "--buckets", "8", "--drain-s", "5", "--data-dir", str(folder / "data")]
    (folder / "tmp").mkdir()
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, env=os.environ | {"TMPDIR": str(folder / "tmp")}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_ready(url) or server.poll() is not None, 180)
            assert server.poll() is None, (folder / "log").read_text()
            yield server, url
        finally:
            server.kill()
            server.wait()


def is_ready(url):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=5, verify=False).status_code == 200
    return False


def run_chaos(folder, num_kills, seconds, seed=1):
    """Serve, load, kill, stop; returns the report after asserting that nothing was lost."""
    with serving(folder) as (server, url):
        expected = undisturbed(url)
        users = [User(url, expected, number) for number in range(NUM_USERS)]
        job_creators = [JobCreator(url, expected, number, NUM_OPEN_JOBS) for number in range(NUM_JOB_CREATORS)]
        killer, monitor = Killer(server.pid, num_kills, seconds, seed), ReadinessMonitor(url)
        for thread in (*users, *job_creators, monitor, killer):
            thread.start()
        began = time.monotonic()
        killer.join()
        wait_until(lambda: is_ready(url), 120)
        for client in (*users, *job_creators):
            client.stop()
        for client in (*users, *job_creators):
            client.join()
        took_s = time.monotonic() - began
        monitor.stop()
        for job_creator in job_creators:
            job_creator.check()
        with httpx.Client(base_url=url, timeout=30) as client:
            known = all_jobs(client)
        children = {child.pid for child in psutil.Process(server.pid).children()}
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    log = (folder / "log").read_text()
    report = {
        **collect_provenance(),
        "kills": dict(killer.killed),
        "planned": {"kills": num_kills, "seconds": seconds, "seed": seed},
        "seconds": round(took_s, 1),
        "images": sum(user.num_images for user in users),
        "jobs": len(known),
        "retries_by_clients": sum(client.num_retries for client in (*users, *job_creators)),
        "longest_wait_s": round(max(user.longest_s for user in users), 1),
        "engine_starts": len(re.findall("engine-0 is ready on", log)),
        "restarts": len(re.findall("starting it again", log)),
        "longest_recovery_s": round(max(monitor.outages_s, default=0.0), 1),
    }
    accepted = {job for job_creator in job_creators for job in job_creator.accepted}
    files = [path for path in (folder / "data" / "results").rglob("*") if path.is_file()]
    assert [fault for client in (*users, *job_creators) for fault in client.faults] == [], report
    assert known == dict.fromkeys(accepted, "succeeded")
    assert sorted(job for job in known for path in files if job in str(path)) == sorted(known), files
    assert len(files) == len(known)
    assert sum(killer.killed.values()) == num_kills
    assert report["images"] >= NUM_USERS
    assert report["jobs"] >= NUM_JOB_CREATORS * NUM_OPEN_JOBS
    assert status == 0
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
    assert [pid for pid in killer.pids | children if psutil.pid_exists(pid)] == []
    left = [path.name for path in (folder / "tmp").iterdir()]
    # torch's cache, one for all processes
    assert [name for name in left if not name.startswith("torchinductor_")] == []
    return report


@pytest.mark.slow  # a minute of kills, and the jobs that are left after it
@pytest.mark.timeout(1200)
def test_a_minute_of_kills_loses_no_image(folder):
    run_chaos(folder, num_kills=20, seconds=60)


@pytest.mark.chaos
@pytest.mark.timeout(2400)
def test_kills_lose_no_image(folder):
    kills, seconds, seed = (
        int(os.environ.get(f"CHAOS_{name}", default))
        for name, default in (("KILLS", 300), ("SECONDS", 600), ("SEED", 1))
    )
    report = run_chaos(folder, kills, seconds, seed)
    print(json.dumps(report, indent=2))
    if file := os.environ.get("CHAOS_REPORT"):
        pathlib.Path(file).write_text(json.dumps(report, indent=2) + "\n")
