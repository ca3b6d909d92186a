"""Clients who want their images whatever happens: they send again what broke, and compare every image with the undisturbed one."""

import itertools
import threading
import time

import httpx

PATIENCE_S = 240.0  # for one image; a server under a kill every two seconds is slow
WISHES = tuple(
    {
        "prompt": prompt,
        "seed": 100 + number,
        "inference_steps": steps,
        "scheduler": scheduler,
        "guidance_scale": guidance,
    }
    for number, (prompt, steps, scheduler, guidance) in enumerate(
        [
            ("a red circle above a blue square", 20, "dpm++2m", 3.0),
            ("a green star", 12, "euler-a", 4.0),
            ("a small yellow star on the left", 16, "ddim", 2.0),
            ("a blue triangle", 8, "heun", 3.0),
            ("a large red square", 25, "pndm", 5.0),
            ("a white circle below a green square", 30, "unipc", 3.0),
        ]
    )
)


def undisturbed(url):
    """The bytes of each wish's image, from a server that nobody troubles."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        answers = [client.post("/t2i", json=wish) for wish in WISHES]
    assert [answer.status_code for answer in answers] == [200] * len(WISHES), [answer.text for answer in answers]
    return [answer.content for answer in answers]


class User(threading.Thread):
    """Draws one wish after the other by `POST /t2i` until `stop`; what it could not get, and what was wrong, is in `faults`."""

    def __init__(self, url, expected, number):
        super().__init__(name=f"user-{number}", daemon=True)
        self._url, self._expected, self._number = url, expected, number
        self._stopping = threading.Event()
        self.num_images = self.num_retries = 0
        self.longest_s = 0.0
        self.faults = []

    def run(self):
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            for number in itertools.count(self._number):
                if self._stopping.is_set():
                    return
                began = time.monotonic()
                self._draw(client, number % len(WISHES), began + PATIENCE_S)
                self.longest_s = max(self.longest_s, time.monotonic() - began)

    def stop(self):
        self._stopping.set()

    def _draw(self, client, number, deadline):
        last = None
        while time.monotonic() < deadline:
            try:
                answer = client.post("/t2i", json=WISHES[number])
            except httpx.TransportError as error:  # the front end was killed
                last = repr(error)
            else:
                last = f"{answer.status_code} {answer.text if answer.status_code != 200 else ''}"
                if answer.status_code == 200:
                    self.num_images += 1
                    if answer.content != self._expected[number]:
                        self.faults.append(f"wish {number} gave another image")
                    return
                if answer.status_code not in (429, 503):
                    self.faults.append(f"wish {number}: {last}")
                    return
            self.num_retries += 1
            time.sleep(0.3)
        self.faults.append(f"wish {number} was not drawn in {PATIENCE_S:g} s; the last answer was {last}")
