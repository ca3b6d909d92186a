"""A large job of texts takes a front end little memory, and does not hold up its event loop."""

import pathlib
import threading
import time

import httpx
import msgspec
import pytest

from encoders import make_tokenizer
from frontends import running_frontend
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until

pytestmark = pytest.mark.slow  # tokenizes 100,000 texts

NUM_TEXTS = 100_000
MAX_GROWTH_BYTES = 24 * 2**20  # includes the allocator's growth; the job is 10 MB of texts and 154 MB of results
MAX_STALL_S = 2.0  # stall of a front end that shares two cores with its engine and this test


def run_job(url: str, num_texts: int) -> None:
    """Encode texts of 100 characters, and read the results in pieces."""
    lines = (b"words %09d of some length " % index + b"and so on " * 7 + b"\n" for index in range(num_texts))
    with httpx.Client(base_url=url, timeout=600) as client:
        job = client.post("/v1/jobs/texts", content=lines, headers={"Content-Type": "text/plain"}).json()
        job = wait_until(lambda: (now := client.get(f"/v1/jobs/{job['id']}").json())["completed_at"] and now, 900)
        assert job["status"] == "succeeded", job
        for result in job["output"]:
            with client.stream("GET", result) as response:
                num_bytes = sum(map(len, response.iter_raw()))
            assert num_bytes > 4 * 384 * num_texts


def test_a_job_of_100_000_texts_takes_little_memory(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    num_ids = make_tokenizer(tmp_path / "encoder")
    spec = msgspec.structs.replace(
        FAKE_ENCODER, folder=str(tmp_path / "encoder"), dimensions=384, vocab_size=num_ids, name="small"
    )
    with FakeEngine(f"ipc://{folder}/memory", models=(spec,)) as engine, running_frontend(engine, tmp_path) as frontend:
        url = f"http://127.0.0.1:{frontend.port}"
        run_job(url, 3000)
        before, peak, slowest_s = frontend.resident_bytes, 0, 0.0
        thread = threading.Thread(target=run_job, args=(url, NUM_TEXTS))
        thread.start()
        with httpx.Client(base_url=url, timeout=60) as client:
            while thread.is_alive():
                started = time.perf_counter()
                client.get("/healthz")
                slowest_s = max(slowest_s, time.perf_counter() - started)
                peak = max(peak, frontend.resident_bytes)
                time.sleep(0.05)
        thread.join()
        print(f"{(peak - before) / 2**20:.1f} MiB, slowest response {slowest_s:.3f} s")
        assert peak - before < MAX_GROWTH_BYTES
        assert slowest_s < MAX_STALL_S
