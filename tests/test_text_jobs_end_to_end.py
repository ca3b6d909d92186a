"""A job of texts on the whole server: whatever is killed, its vectors are those of /v1/embeddings."""

import contextlib
import io
import itertools

import httpx
import numpy as np
import psutil
import pytest

from encoders import TEXTS, make_encoder, sentence_transformer
from noria.testing.server import running_server
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # starts a server twice

NUM_TEXTS, CHUNK_TEXTS = 12_000, 1024


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("small"), **sentence_transformer())


def test_a_job_whose_processes_are_killed_continues_to_the_vectors_of_the_route(encoder, tmp_path):
    usual = itertools.cycle([text for text in TEXTS if text])
    texts = [f"{next(usual)} {index}" for index in range(NUM_TEXTS)]
    arguments = [str(encoder), "--data-dir", str(tmp_path), "--threads", "1", "--restart-wait-s", "280"]
    with running_server(arguments) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as web:
        wait_until(lambda: web.get("/readyz").status_code == 200)
        body, headers = "\n".join(texts).encode(), {"Content-Type": "text/plain"}
        job_id = web.post("/v1/jobs/texts", content=body, headers=headers, timeout=120).json()["id"]
        parts = tmp_path / "results" / job_id
        wait_until(lambda: parts.exists() and len(list(parts.glob("part-*.f32"))) >= 2)
        for each in server.children("engine"):
            each.kill()  # its requests are retried
        wait_until(lambda: len(list(parts.glob("part-*.f32"))) >= 3)
        for each in (server.process, *server.process.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    stored = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.f32")}
    assert 3 <= len(stored) < NUM_TEXTS // CHUNK_TEXTS
    with (
        running_server(arguments) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=300) as web,
    ):
        job = wait_until(lambda: (now := web.get(f"/v1/jobs/{job_id}").json())["completed_at"] and now, 300)
        assert (job["status"], job["metrics"]["num_texts"]) == ("succeeded", NUM_TEXTS)
        assert stored.items() <= {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.f32")}.items()
        vectors = np.load(io.BytesIO(web.get(f"/v1/jobs/{job_id}/results.npy").content))
        for start in range(0, NUM_TEXTS, 1500):
            answer = web.post("/v1/embeddings", json={"input": texts[start : start + 1500]}).json()["data"]
            expected = np.array([each["embedding"] for each in answer], np.float32)
            np.testing.assert_allclose(vectors[start : start + 1500], expected, atol=1e-5)
