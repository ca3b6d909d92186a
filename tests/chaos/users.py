"""Clients that retry each failed request, and compare every image with the one of an undisturbed server.

A `User` waits for each image. A `JobCreator` posts a job until it is accepted, and then polls it.
"""

import itertools
import json
import threading
import time

import httpx

TIMEOUT_S = 240.0  # for one image after the last kill; before it, a client retries for as long as it takes
RETRY_S, POLL_S = 0.5, 1.0  # clients and server share the machine
REQUESTS = tuple(
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
    """The bytes of each request's image, while nothing is killed."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        answers = [client.post("/t2i", json=request) for request in REQUESTS]
    assert [answer.status_code for answer in answers] == [200] * len(REQUESTS), [answer.text for answer in answers]
    return [answer.content for answer in answers]


class Stop:
    """Whether a client is to stop, and since when."""

    def __init__(self):
        self._since = None

    def set(self):
        self._since = time.monotonic()

    def is_set(self):
        return self._since is not None

    @property
    def timed_out(self):
        return self._since is not None and time.monotonic() - self._since > TIMEOUT_S


class User(threading.Thread):
    """Sends one `POST /t2i` after the other until `stop`; what failed or was wrong is in `faults`."""

    def __init__(self, url, expected, number):
        super().__init__(name=f"user-{number}", daemon=True)
        self._url, self._expected, self._number = url, expected, number
        self._stopping = Stop()
        self.num_images = self.num_retries = 0
        self.longest_s = 0.0
        self.faults = []

    def run(self):
        with httpx.Client(base_url=self._url, timeout=TIMEOUT_S) as client:
            for number in itertools.count(self._number):
                if self._stopping.is_set():
                    return
                began = time.monotonic()
                self._generate(client, number % len(REQUESTS))
                self.longest_s = max(self.longest_s, time.monotonic() - began)

    def stop(self):
        self._stopping.set()

    def _generate(self, client, number):
        last = None
        while not self._stopping.timed_out:
            try:
                answer = client.post("/t2i", json=REQUESTS[number])
            except httpx.TransportError as error:  # the front end was killed
                last = repr(error)
            else:
                last = f"{answer.status_code} {answer.text if answer.status_code != 200 else ''}"
                if answer.status_code == 200:
                    self.num_images += 1
                    if answer.content != self._expected[number]:
                        self.faults.append(f"request {number} gave another image")
                    return
                if answer.status_code not in (429, 503):
                    self.faults.append(f"request {number}: {last}")
                    return
            self.num_retries += 1
            time.sleep(RETRY_S)
        self.faults.append(
            f"request {number} failed for {TIMEOUT_S:g} s after the last kill; the last answer was {last}"
        )


ENDED = ("succeeded", "failed", "canceled")


class JobCreator(threading.Thread):
    """Keeps `num_open` jobs open until `stop`, then waits for the last one. `accepted`: job id → request's number."""

    def __init__(self, url, expected, number, num_open):
        super().__init__(name=f"jobs-{number}", daemon=True)
        self._url, self._expected, self._number, self._num_open = url, expected, number, num_open
        self._stopping = Stop()
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
                    self._poll(client)
                    time.sleep(POLL_S)
            while self._open and not self._stopping.timed_out:
                self._poll(client)
                time.sleep(POLL_S)
        self.faults += [f"{job} is still {status} at the end" for job, status in self._open.items()]

    def stop(self):
        self._stopping.set()

    def check(self):
        """Each job ended exactly once, with the image of an undisturbed server."""
        with httpx.Client(base_url=self._url, timeout=30) as client:
            for job, number in self.accepted.items():
                ends = [name for name in statuses(client, job) if name in ENDED]
                if ends != ["succeeded"]:
                    self.faults.append(f"{job} ended as {ends}: {client.get(f'/v1/jobs/{job}').text}")
                elif client.get(f"/v1/jobs/{job}/images/0").content != self._expected[number % len(REQUESTS)]:
                    self.faults.append(f"{job} gave another image")

    def _post(self, client, number):
        key = {"Idempotency-Key": f"{self.name}-{number}"}  # so that a retry creates no second job
        answer = self._retry(
            lambda: client.post("/v1/jobs", json={"input": REQUESTS[number % len(REQUESTS)]}, headers=key)
        )
        if answer is not None:
            job = answer.json()
            self.accepted[job["id"]], self._open[job["id"]] = number, job["status"]

    def _poll(self, client):
        for job in list(self._open):
            answer = self._retry(lambda job=job: client.get(f"/v1/jobs/{job}"))
            if answer is not None:
                self._open[job] = answer.json()["status"]
                if self._open[job] in ENDED:
                    del self._open[job]

    def _retry(self, send):
        """The first successful answer; None if there is none, which is a fault."""
        while not self._stopping.timed_out:
            try:
                answer = send()
            except httpx.TransportError:
                pass
            else:
                if answer.is_success:
                    return answer
                if answer.status_code not in (429, 503):
                    self.faults.append(f"{answer.request.url}: {answer.status_code} {answer.text}")
                    return None
            self.num_retries += 1
            time.sleep(RETRY_S)
        self.faults.append(f"no answer for {TIMEOUT_S:g} s after the last kill")
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
