"""A fast fake target, a process of its own with a given behaviour: `python image_server.py BEHAVIOUR`.

It prints its port.
"""

import contextlib
import http.server
import io
import json
import os
import subprocess
import sys
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


class ImageHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536

    def do_GET(self):
        if self.path.startswith("/v1/models/"):
            self.answer(200, json.dumps(MODEL).encode(), "application/json")
        else:
            self.answer(200, b"ready", "text/plain")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(0.05)
        match self.server.behaviour:
            case "fine":
                self.answer(200, png(body), "image/png")
            case "another":
                self.answer(200, png(body | {"prompt": "another"}), "image/png")
            case "truncated":
                self.answer(200, png(body)[:-100], "image/png")
            case "cut":  # within the body
                self.answer(200, png(body), "image/png", num_bytes_cut=100)
            case "broken":
                self.answer(500, b"{}", "application/json")
            case "dying":
                self.server.num_answers_left -= 1
                if self.server.num_answers_left < 0:
                    os._exit(3)
                self.answer(200, png(body), "image/png")

    def answer(self, status, content, kind, num_bytes_cut=0):
        self.send_response(status)
        for name, value in {
            "content-type": kind,
            "content-length": str(len(content)),
            "X-Batch-Size": "3",
            "Server-Timing": "queue;dur=5.0, denoise;dur=35.0, predicted;dur=80.0",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) - num_bytes_cut])
        self.close_connection = num_bytes_cut > 0

    def log_message(self, *_):
        pass


class ImageServer(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    num_answers_left = 10  # until a dying one ends

    def handle_error(self, *_):
        pass


@contextlib.contextmanager
def running(behaviour):
    """A running server, as `running_target` gives it."""
    with subprocess.Popen([sys.executable, __file__, behaviour], stdout=subprocess.PIPE) as child:
        try:
            yield RunningServer(int(child.stdout.readline()), 0.5, psutil.Process(child.pid))
        finally:
            child.kill()


if __name__ == "__main__":
    with ImageServer(("127.0.0.1", 0), ImageHandler) as server:
        server.behaviour = sys.argv[1]
        print(server.server_port, flush=True)  # it listens: connections from now on are answered
        server.serve_forever()
