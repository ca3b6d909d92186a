"""Clients who want their images whatever happens: they send again what broke, and compare every image with the undisturbed one.

A `User` waits for its image and asks again when it was not to be had; a `Poster` posts jobs, each until it is accepted, and then only asks.
"""

import itertools
import json
import threading
import time

import httpx

PATIENCE_S = 240.0  # for one image from a server that is left alone; while it is troubled, a client goes on asking
BETWEEN_TRIES_S, BETWEEN_LOOKS_S = 0.5, 1.0  # clients and server share the machine
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


class Stopping:
    """Whether a client is to stop, and for how long it has known."""

    def __init__(self):
        self._since = None

    def set(self):
        self._since = time.monotonic()

    def is_set(self):
        return self._since is not None

    @property
    def out_of_patience(self):
        return self._since is not None and time.monotonic() - self._since > PATIENCE_S


class User(threading.Thread):
    """Draws one wish after the other by `POST /t2i` until `stop`; what it could not get, and what was wrong, is in `faults`."""

    def __init__(self, url, expected, number):
        super().__init__(name=f"user-{number}", daemon=True)
        self._url, self._expected, self._number = url, expected, number
        self._stopping = Stopping()
        self.num_images = self.num_retries = 0
        self.longest_s = 0.0
        self.faults = []

    def run(self):
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            for number in itertools.count(self._number):
                if self._stopping.is_set():
                    return
                began = time.monotonic()
                self._draw(client, number % len(WISHES))
                self.longest_s = max(self.longest_s, time.monotonic() - began)

    def stop(self):
        self._stopping.set()

    def _draw(self, client, number):
        last = None
        while not self._stopping.out_of_patience:
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
            time.sleep(BETWEEN_TRIES_S)
        self.faults.append(f"wish {number} was not drawn within {PATIENCE_S:g} s of peace; the last answer was {last}")


ENDED = ("succeeded", "failed", "canceled")


class Poster(threading.Thread):
    """Keeps `num_open` jobs open until `stop`, then waits for the last one. `accepted` is job id → wish."""

    def __init__(self, url, expected, number, num_open):
        super().__init__(name=f"poster-{number}", daemon=True)
        self._url, self._expected, self._number, self._num_open = url, expected, number, num_open
        self._stopping = Stopping()
        self._open = {}
        self.accepted = {}
        self.num_retries = 0
        self.faults = []

    def run(self):
        with httpx.Client(base_url=self._url, timeout=30) as client:
            for number in itertools.count(self._number):
                if self._stopping.is_set():
                    break
                self._post(client, number)
                while len(self._open) >= self._num_open and not self._stopping.is_set():
                    self._look(client)
                    time.sleep(BETWEEN_LOOKS_S)
            while self._open and not self._stopping.out_of_patience:
                self._look(client)
                time.sleep(BETWEEN_LOOKS_S)
        self.faults += [f"{job} is still {status} at the end" for job, status in self._open.items()]

    def stop(self):
        self._stopping.set()

    def check(self):
        """Each job ended exactly once, with the image that its wish gives undisturbed."""
        with httpx.Client(base_url=self._url, timeout=30) as client:
            for job, number in self.accepted.items():
                ends = [name for name in statuses(client, job) if name in ENDED]
                if ends != ["succeeded"]:
                    self.faults.append(f"{job} ended as {ends}: {client.get(f'/v1/jobs/{job}').text}")
                elif client.get(f"/v1/jobs/{job}/images/0").content != self._expected[number % len(WISHES)]:
                    self.faults.append(f"{job} gave another image")

    def _post(self, client, number):
        key = {"Idempotency-Key": f"{self.name}-{number}"}  # so that asking again makes no second job
        answer = self._insist(
            lambda: client.post("/v1/jobs", json={"input": WISHES[number % len(WISHES)]}, headers=key)
        )
        if answer is not None:
            job = answer.json()
            self.accepted[job["id"]], self._open[job["id"]] = number, job["status"]

    def _look(self, client):
        for job in list(self._open):
            answer = self._insist(lambda job=job: client.get(f"/v1/jobs/{job}"))
            if answer is not None:
                self._open[job] = answer.json()["status"]
                if self._open[job] in ENDED:
                    del self._open[job]

    def _insist(self, ask):
        """The first answer that is one; None when that was a fault."""
        while not self._stopping.out_of_patience:
            try:
                answer = ask()
            except httpx.TransportError:
                pass
            else:
                if answer.is_success:
                    return answer
                if answer.status_code not in (429, 503):
                    self.faults.append(f"{answer.request.url}: {answer.status_code} {answer.text}")
                    return None
            self.num_retries += 1
            time.sleep(BETWEEN_TRIES_S)
        self.faults.append(f"no answer within {PATIENCE_S:g} s of peace")
        return None


def statuses(client, job):
    """The statuses in a job's events, in order; the stream ends with the job."""
    text = client.get(f"/v1/jobs/{job}/events").text
    blocks = [
        dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        for block in text.split("\n\n")
    ]
    return [json.loads(block["data"])["status"] for block in blocks if block.get("event") == "status"]


def all_jobs(client):
    """Every job that the server knows: id → status."""
    jobs, page = {}, "/v1/jobs?limit=100"
    while page:
        answer = client.get(page).json()
        jobs |= {job["id"]: job["status"] for job in answer["results"]}
        page = answer["next"]
    return jobs
