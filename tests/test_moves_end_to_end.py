"""A real server with two engines, one of which is stopped under load: nothing is drawn twice."""

import concurrent.futures
import os

import httpx
import psutil
import pytest

from noria.protocol.process_signals import STOP_SIGNAL
from noria.testing.server import running_server
from waiting import TIMEOUT_S, wait_until

MODEL = ["bundled", "--devices", "cpu,cpu", "--slots", "4", "--threads", "1", "--buckets", "8"]
STEPS = 12
SCHEDULERS = ["ddim", "euler-a", "dpm++2m", "heun", "pndm", "unipc"]


def body_of(number):
    return {
        "prompt": "a red circle above a blue square",
        "width": 64,
        "height": 64,
        "seed": number,
        "scheduler": SCHEDULERS[number % len(SCHEDULERS)],
        "inference_steps": STEPS,
        "metadata": False,
    }


def num_calls(number):
    return STEPS + {"heun": STEPS - 1, "pndm": 1}.get(SCHEDULERS[number % len(SCHEDULERS)], 0)


def total(http, name, **labels):
    """The sum of a metric's series with these labels."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))


def engine_pids(server):
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if " ".join(child.cmdline()).startswith("noria engine")]


@pytest.mark.slow  # a server of its own, with two engines
def test_an_engine_that_is_stopped_under_load_loses_no_step_and_changes_no_image():
    numbers = range(12)
    with (
        running_server(MODEL) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT_S, trust_env=False) as http,
        concurrent.futures.ThreadPoolExecutor(len(numbers)) as users,
    ):

        def image(number):
            answer = http.post("/t2i", json=body_of(number))
            assert answer.status_code == 200, answer.text
            return answer.content

        undisturbed = list(users.map(image, numbers))
        num_steps = sum(num_calls(number) for number in numbers)
        assert total(http, "noria_denoise_steps_total") >= num_steps
        before = total(http, "noria_denoise_steps_total")
        answers = [users.submit(image, number) for number in numbers]
        wait_until(lambda: total(http, "noria_denoise_steps_total") > before + 20)
        os.kill(engine_pids(server)[0], STOP_SIGNAL)
        moved = [answer.result() for answer in answers]
        assert total(http, "noria_denoise_steps_total") == before + num_steps
        assert total(http, "noria_images_moved_total", outcome="moved") >= 1
        assert total(http, "noria_images_moved_total", outcome="refused") == 0
        for number in numbers:
            assert moved[number] == undisturbed[number], number
