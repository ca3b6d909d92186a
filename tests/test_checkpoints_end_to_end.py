"""A real server with a folder of checkpoints in single files, of which its engine holds one at a time."""

import concurrent.futures

import httpx
import pytest

import single_files
from noria.testing.server import running_server
from waiting import TIMEOUT_S

SIDE = {"modelspec.resolution": "64x64"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    parts = single_files.load_parts(single_files.save_folder(tmp_path_factory.mktemp("sd1") / "folder", "sd1"))
    tensors = single_files.checkpoint_tensors(parts, "sd1")
    for number, name in enumerate(("first", "second", "damaged")):
        changed = {key: value * (1 + number / 2) for key, value in tensors.items() if "diffusion_model" in key}
        single_files.save_checkpoint(folder / f"{name}.safetensors", tensors | changed, SIDE)
    return folder


@pytest.mark.slow  # a server of its own
def test_one_engine_serves_all_checkpoints_of_a_folder_one_after_the_other(models, tmp_path):
    flags = ["--checkpoints", str(models), "--devices", "cpu", "--slots", "2", "--cache-dir", str(tmp_path / "cache")]
    flags += ["--mount-niceness", "5"]  # at 19 a load waits until no other test wants a core
    flags += ["--buckets", "4"]  # so an image is the same in every bit with others in its calls and without
    with (
        running_server(flags) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT_S, trust_env=False) as http,
        concurrent.futures.ThreadPoolExecutor(6) as users,
    ):

        def image(name, steps=4):
            settings = {"sd_model_checkpoint": f"{name}.safetensors [6ce0161689]"}
            body = {"prompt": "a red circle", "seed": 1, "steps": steps, "override_settings": settings}
            answer = http.post("/sdapi/v1/txt2img", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["images"][0]

        def loaded():
            return {each["id"] for each in http.get("/v1/models").json()["data"] if each["loaded"]} - {"noria-shapes"}

        assert loaded() == set()
        first, again = users.map(image, ("first", "first"))  # one conversion and one load
        assert first == again
        assert loaded() == {"first"}
        in_flight = users.submit(image, "first", 60)
        second = image("second")
        assert second != first
        in_flight.result()
        assert list(users.map(image, ("first", "second") * 3)) == [first, second] * 3
        assert len(loaded()) == 1

        damaged = (models / "damaged.safetensors").read_bytes()
        (models / "damaged.safetensors").write_bytes(damaged[: len(damaged) // 2])
        failed = http.post("/t2i", json={"prompt": "a", "model": "damaged"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_not_loaded")
        (models / "damaged.safetensors").write_bytes(damaged)
        assert image("damaged") not in (first, second)
