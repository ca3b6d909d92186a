"""A fast fake target, a process of its own with a given behaviour: `python image_server.py BEHAVIOUR`.

It prints its port.
"""

import contextlib
import functools
import io
import itertools
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
from PIL import Image

from noria.testing.server import RunningServer

# The answer of `/v1/models/{model}`: its calls take twice as long as it had measured.
MODEL = {
    "load": {"num_slots": 16},
    "costs": [
        {"width_px": side, "height_px": side, "stage": 0, "reference_px": 0, "slowdown": 2.0, "text_encode_s": 1e-4,
         "step_totals": {}, "decode_totals": {},
         "step_s": {"1": 2e-4, "2": 4e-4}, "decode_s": {"1": 2e-4}}
        for side in (96, 128)
    ],
}  # fmt: skip


def pixels(body):
    """An image that prompt and seed determine."""
    rng = np.random.default_rng([*body["prompt"].encode(), body["seed"]])
    return rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)


def png(body):
    file = io.BytesIO()
    Image.fromarray(pixels(body)).save(file, "PNG")
    return file.getvalue()


HEADERS = {"X-Batch-Size": "3", "Server-Timing": "queue;dur=5.0, denoise;dur=35.0, predicted;dur=80.0"}
PNG = HEADERS | {"content-type": "image/png"}
answers_left = itertools.count(10, -1)  # until a dying server ends


def answer(request, behaviour):
    if request.command == "GET":
        return request.send(MODEL if request.path.startswith("/v1/models/") else b"ready", headers=HEADERS)
    time.sleep(0.05)
    match behaviour:
        case "another":
            return request.send(png(request.json | {"prompt": "another"}), headers=PNG)
        case "truncated":
            return request.send(png(request.json)[:-100], headers=PNG)
        case "cut":  # within the body
            content, request.close_connection = png(request.json), True
            return request.send(content[:-100], headers=PNG, length=len(content))
        case "broken":
            return request.send(b"{}", 500, HEADERS)
        case "dying" if next(answers_left) <= 0:
            os._exit(3)
    return request.send(png(request.json), headers=PNG)


@contextlib.contextmanager
def running(behaviour):
    """A running server, as `running_target` gives it."""
    with subprocess.Popen([sys.executable, __file__, behaviour], stdout=subprocess.PIPE) as child:
        try:
            yield RunningServer(int(child.stdout.readline()), 0.5, psutil.Process(child.pid))
        finally:
            child.kill()


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))
    from http_servers import HttpServer

    with HttpServer(functools.partial(answer, behaviour=sys.argv[1])) as server:
        print(server.server_port, flush=True)  # it listens: connections from now on are answered
        threading.Event().wait()
