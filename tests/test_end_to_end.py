"""The whole server as a user starts it: real processes, the bundled model, unmodified clients."""

import base64
import concurrent.futures
import contextlib
import io
import json
import random
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import httpx
import numpy as np
import openai
import psutil
import pytest
from PIL import Image

from noria.testing.server import running_process, running_server
from waiting import wait_until

PROMPT = "a red circle above a blue square"
# One thread, because other tests use the other cores: of two, the slower would hold up the other in every operation.
# With the same settings, only the first server measures costs.
BUNDLED = ("bundled", "--slots", "4", "--threads", "1")


@pytest.fixture(scope="module")
def server():
    arguments = [*BUNDLED, "--hang-timeout-s", "10"]
    arguments += ["--restart-wait-s", "280"]  # a busy machine takes more than the default minute to start an engine
    with running_server(arguments) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as opened:
        wait_until(lambda: opened.get("/readyz").is_success)  # the test before may have killed an engine
        yield opened


# What a client sees must not depend on where the server runs; tests with `either` run against both.
SERVERS = ["plain", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(1500)])]


@pytest.fixture(scope="module", params=SERVERS)
def address(request):
    """The address of the plain server, and of one on a Ray cluster."""
    if request.param == "plain":
        return f"http://127.0.0.1:{request.getfixturevalue('server').port}"
    world = request.getfixturevalue("ray_world")
    wait_until(world.is_whole, 240)
    return f"http://127.0.0.1:{world.port}"


@pytest.fixture
def either(address):
    with httpx.Client(base_url=address, timeout=280) as opened:
        wait_until(lambda: opened.get("/readyz").is_success)
        yield opened


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def engine(server):
    (found,) = server.children("engine")
    return found


def metric(client, name, label=""):
    """The sum of its series, or of those with `label`; on Ray over all replicas."""
    targets = client.get("/metrics/targets")
    addresses = [f"http://{each['targets'][0]}" for each in targets.json()] if targets.is_success else [""]
    lines = [line for address in addresses for line in client.get(f"{address}/metrics").text.splitlines()]
    found = [line for line in lines if line.split("{")[0].split(" ")[0] == name and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def num_joined(client):
    """Images that have ever joined the batch; a counter, so that late reads miss none."""
    return metric(client, "noria_joins_total")


@contextlib.contextmanager
def open_request(port, request, receive_bytes=None, body_bytes=0):
    """Send `request` to `port` over a connection that is closed at the end, optionally with a small receive buffer.

    Its body has at least `body_bytes` bytes.
    """
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", port))
        body = json.dumps(request).encode().ljust(body_bytes)
        head = (
            "POST /t2i HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        yield connection


def test_one_image_is_returned_as_bytes(either):
    answer = either.post("/t2i", json={"prompt": PROMPT, "seed": 3})
    assert answer.status_code == 200
    assert len(answer.headers.get_list("x-request-id")) == 1  # Ray adds one, too
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-noria-seed"] == "3"
    assert answer.headers["x-noria-model"] == "noria-shapes"
    assert {part.split(";")[0].strip() for part in answer.headers["server-timing"].split(",")} >= {
        "queue",
        "text_encode",
        "denoise",
        "decode",
    }
    assert pixels(answer.content).shape == (128, 128, 3)


def test_a_stopped_supervisor_blocks_no_request(server, client):
    """The test makes the server log more lines than a pipe can hold."""
    server.process.suspend()
    try:
        for _ in range(300):
            assert client.get(f"/{'x' * 8000}").status_code == 404
        assert client.get("/healthz").status_code == 200
        assert client.post("/t2i", json={"prompt": PROMPT, "inference_steps": 4}).status_code == 200
    finally:
        server.process.resume()


def test_the_same_seed_gives_the_same_image_under_load(client):
    body = {"prompt": PROMPT, "seed": 11, "inference_steps": 10}
    unbatched = pixels(client.post("/t2i", json=body).content)
    background = [
        {"prompt": "a green star", "seed": k, "inference_steps": 5 + k, "scheduler": name, "guidance_scale": 1 + k}
        for k, name in enumerate(["euler", "euler-a", "pndm", "heun", "unipc", "ddim"])
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as users:
        answers = list(users.map(lambda request: client.post("/t2i", json=request), [*background, body]))
    assert [answer.status_code for answer in answers] == [200] * 7
    assert np.abs(pixels(answers[-1].content) - unbatched).max() <= 1  # kernels round differently with the batch's size


def test_the_unmodified_openai_client_works(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as official:
        assert next(iter(official.models.list())).id == "noria-shapes"
        answer = official.images.generate(
            prompt=PROMPT, n=2, size="128x128", extra_body={"seed": 5, "inference_steps": 4}
        )
        assert len(answer.data) == 2
        with pytest.raises(openai.BadRequestError, match="multiple of"):
            official.images.generate(prompt=PROMPT, size="130x128")


def test_images_from_an_image_by_every_route(address, either):
    """With the upper half repainted the lower one stays, also in a job; the metadata say what is needed again."""
    file = either.post("/t2i", json={"prompt": PROMPT, "seed": 7, "inference_steps": 8}).content
    start, half = pixels(file), pixels(file).shape[0] // 2
    size = start.shape[1], start.shape[0]
    white, transparent = Image.new("L", size), Image.new("RGBA", size, "black")
    white.paste(255, (0, 0, size[0], half))
    transparent.paste((0, 0, 0, 0), (0, 0, size[0], half))
    image, mask = base64.b64encode(file).decode(), base64.b64encode(as_png(white)).decode()
    settings = {"seed": 3, "inference_steps": 8, "strength": 0.9}
    body = {"prompt": "a green star", "image": image, "mask": mask} | settings
    edited = either.post("/t2i", json=body).content
    changes = np.abs(pixels(edited) - start).mean(axis=(1, 2))
    assert changes[:half].mean() > 5 * changes[half:].mean()
    assert either.post("/v1/images/metadata", content=edited).json()["rejected"][0]["field"] == "image"

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
        answer = official.images.edit(image=file, mask=as_png(transparent), prompt="a green star", extra_body=settings)
    a1111 = either.post(
        "/sdapi/v1/img2img",
        json={"prompt": "a green star", "init_images": [image], "mask": mask, "seed": 3, "steps": 8}
        | {"denoising_strength": 0.9, "mask_blur": 0, "inpaint_full_res": False, "inpainting_fill": 1},
    ).json()
    job = either.post("/v1/jobs", json={"input": body}).json()
    wait_until(lambda: either.get(f"/v1/jobs/{job['id']}").json()["status"] == "succeeded")
    others = [
        base64.b64decode(answer.data[0].b64_json),
        either.get(f"/v1/jobs/{job['id']}/images/0").content,
    ]
    for other in others:
        assert np.abs(pixels(other) - pixels(edited)).max() <= 1
    pasted = np.concatenate([pixels(edited)[:half], start[half:]])  # A1111 pastes it into the image
    assert np.abs(pixels(base64.b64decode(a1111["images"][0])) - pasted).max() <= 1


def as_png(image):
    file = io.BytesIO()
    image.save(file, format="png")
    return file.getvalue()


@pytest.mark.slow  # `noria generate` imports torch and diffusers: 10 s; tests/frontend/protocols holds the API
def test_a1111_clients_work_and_generate_repeats_their_files_without_the_server(client, tmp_path):
    fields = {
        "prompt": PROMPT,
        "seed": 5,
        "steps": 4,
        "cfg_scale": 3,
        "sampler_name": "DPM++ 2M",
        "scheduler": "Karras",
    }
    answer = client.post("/sdapi/v1/txt2img", json=fields).json()
    data = base64.b64decode(answer["images"][0])
    (tmp_path / "a.png").write_bytes(data)
    command = [sys.executable, "-m", "noria", "generate", "--threads", "1", "--like", "a.png", "-o", "b.png"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert np.abs(pixels((tmp_path / "b.png").read_bytes()) - pixels(data)).max() <= 1  # as under any other load
    same = {"prompt": PROMPT, "seed": 5, "inference_steps": 4, "guidance_scale": 3, "scheduler": "dpm++2m-karras"}
    assert np.abs(pixels(client.post("/t2i", json=same).content) - pixels(data)).max() <= 1
    models = client.get("/sdapi/v1/sd-models").json()
    assert client.get("/sdapi/v1/options").json()["sd_model_checkpoint"] == models[0]["title"]
    assert {"Euler a", "DPM++ 2M"} <= {sampler["name"] for sampler in client.get("/sdapi/v1/samplers").json()}


def cancelled_images(client):
    return metric(client, "noria_departures_total", 'outcome="cancelled"')


@pytest.mark.parametrize("body_bytes", [0, 1_000_000])
def test_a_disconnecting_client_frees_its_slots(either, body_bytes):
    joined_before, cancelled_before = num_joined(either), cancelled_images(either)
    request = {"prompt": PROMPT, "inference_steps": 200, "n": 16}
    with open_request(either.base_url.port, request, body_bytes=body_bytes):
        wait_until(lambda: num_joined(either) >= joined_before + 4)
    wait_until(lambda: cancelled_images(either) == cancelled_before + 4)
    wait_until(lambda: metric(either, "noria_slots_used") == 0)


def test_a_client_that_leaves_a_stream_at_its_first_event_frees_its_slots(either):
    """A part that collects a stream before it passes it on would not let the client leave in time."""
    before = cancelled_images(either)
    body = {"prompt": PROMPT, "inference_steps": 200, "n": 16, "stream": True, "partial_images": 2}
    with either.stream("POST", "/t2i", json=body) as answer:
        assert next(answer.iter_lines()).startswith("event: ")
    wait_until(lambda: cancelled_images(either) > before)
    wait_until(lambda: metric(either, "noria_slots_used") == 0)


def test_clients_that_do_not_read_occupy_no_slot_and_little_memory(client, server):
    (frontend,) = server.children("frontend")
    # fills memory pools
    assert client.post("/t2i", json={"prompt": PROMPT, "n": 16, "inference_steps": 1}).status_code == 200
    before, images_before = frontend.memory_info().rss, metric(client, "noria_images_total")
    request = {"prompt": PROMPT, "n": 16, "inference_steps": 1, "format": "png"}
    with contextlib.ExitStack() as stalled:
        for _ in range(2):
            stalled.enter_context(open_request(server.port, request, receive_bytes=4096))
        wait_until(lambda: metric(client, "noria_images_total") - images_before == 2 * 16, 240)
        wait_until(lambda: metric(client, "noria_slots_used") == 0)
        assert client.post("/t2i", json={"prompt": PROMPT, "inference_steps": 2}).status_code == 200
        assert frontend.memory_info().rss - before < 50e6


def test_processes_name_themselves_for_ps(server):
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    for name in ("noria supervisor", "noria frontend", "noria engine"):
        assert name in listing


# An engine starts again: 8 s of CPU; tests/supervisor restarts engines, tests/frontend/engines repeats requests.
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="hanging")]
)
def test_a_killed_or_hung_engine_is_restarted_and_its_requests_are_answered(number, client, server):
    body = {"prompt": PROMPT, "seed": 21, "inference_steps": 60}
    undisturbed = pixels(client.post("/t2i", json=body).content)
    joined_before, before = num_joined(client), engine(server)
    with concurrent.futures.ThreadPoolExecutor(1) as users:
        pending = users.submit(client.post, "/t2i", json=body)
        wait_until(lambda: num_joined(client) > joined_before)
        if number == signal.SIGKILL:
            server.process.suspend()  # so that the engine is not restarted before the check
        try:
            before.send_signal(number)
            if number == signal.SIGKILL:
                wait_until(lambda: client.get("/readyz").status_code == 503)
        finally:
            server.process.resume()
        wait_until(lambda: engine(server) != before, ignoring=(ValueError, psutil.NoSuchProcess))
        answer = pending.result()
    assert client.get("/readyz").status_code == 200
    assert answer.status_code == 200, answer.text
    assert np.array_equal(pixels(answer.content), undisturbed)


class TerminatedServer(NamedTuple):
    """The outcome of a server that was terminated while it generated an image and a stream."""

    in_flight_status: int  # the HTTP status of that image's response
    last_event: str  # name of the stream's last event
    exit_status: int
    children: list[psutil.Process]
    prompt: str
    job_id: str
    log: str


@pytest.fixture(scope="module")
def terminated(tmp_path_factory):
    """Its log has every line, of a request "find-me", of a job, and of paths and headers with secrets."""
    prompt, log = 'x\n{"level": "critical"}\x1b[2J', tmp_path_factory.mktemp("log") / "stderr"
    command = [sys.executable, "-m", "noria", "serve", *BUNDLED, "--drain-s", "280"]
    command += ["--data-dir", str(tmp_path_factory.mktemp("data")), "--log-level", "debug", "--log-prompts", "full"]
    with (
        running_process(lambda port: [*command, "--port", str(port)], log=log) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as client,
        concurrent.futures.ThreadPoolExecutor(2) as users,
    ):
        children = server.process.children()
        headers = {"x-request-id": "find-me", "authorization": "Bearer hunter2hunter2hunter2"}
        body = {"prompt": prompt, "inference_steps": 2, "scheduler": "euler"}
        assert client.post("/t2i", json=body, headers=headers).status_code == 200
        client.get("/no/such/%0Apath?token=hunter2", headers={"x-api-key": "hunter2"})
        job_id = client.post("/v1/jobs", json={"input": body}).json()["id"]
        wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["status"] == "succeeded")
        joined_before = num_joined(client)
        body = {"prompt": PROMPT, "inference_steps": 60}
        pending = users.submit(client.post, "/t2i", json=body)
        stream = users.submit(client.post, "/t2i", json=body | {"stream": True})
        wait_until(lambda: num_joined(client) >= joined_before + 2)
        # As systemd does with SendSIGHUP, and a wrapper that forwards the signal.
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            for process in (*children, server.process):
                process.send_signal(number)
        in_flight_status, events = pending.result().status_code, stream.result().text
        exit_status = server.process.wait(120)
    last_event = events.rpartition("event: ")[2].split("\n")[0]
    return TerminatedServer(in_flight_status, last_event, exit_status, children, prompt, job_id, log.read_text())


@pytest.mark.slow  # a server of its own: 15 s of CPU time; tests/frontend/server and tests/supervisor drain
def test_signals_to_all_processes_let_requests_in_flight_finish_and_the_server_exit_0(terminated):
    assert (terminated.in_flight_status, terminated.last_event, terminated.exit_status) == (200, "finished", 0)
    wait_until(lambda: not any(child.is_running() for child in terminated.children))


@pytest.mark.slow  # imports torch: 10 s
def test_signals_to_all_processes_while_a_model_loads_end_the_server_in_order(tmp_path):
    command = [sys.executable, "-m", "noria", "serve", *BUNDLED, "--port", "0", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        server = psutil.Process(process.pid)
        wait_until(lambda: len(server.children()) == 3)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            for each in (*server.children(), server):
                with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended at the first signal
                    each.send_signal(number)
        lines = [json.loads(line) for line in process.stderr]
        assert process.wait(120) == 0
    assert [line["event"] for line in lines if line["process"] == "supervisor"] == ["stopping", "stopped"]
    assert not [line for line in lines if line["level"] in ("warning", "error", "critical")]


@pytest.mark.slow  # uses the same server; tests/supervisor collects lines, tests/observe/logs removes secrets
def test_logs_of_all_processes_have_the_request_id_and_no_secret(terminated):
    assert "hunter2" not in terminated.log
    lines = [json.loads(line) for line in terminated.log.split("\n") if line]
    assert not [line for line in lines if line["level"] in ("warning", "error", "critical")]
    for request_id in ("find-me", terminated.job_id):
        found = {(line["process"], line.get("event")) for line in lines if line.get("request_id") == request_id}
        assert found >= {("frontend-0", "request"), ("engine-0", "request_ended")}
        (request_line,) = [
            line for line in lines if (line.get("request_id"), line.get("event")) == (request_id, "request")
        ]
        assert (
            request_line["outcome"],
            request_line["prompt"],
            request_line["inference_steps"],
            request_line["mean_batch"],
        ) == (
            "ok",
            terminated.prompt,
            2,
            1.0,
        )
        total_s = sum(
            request_line[f"{stage}_s"] for stage in ("queue", "text_encode", "denoise", "decode", "postprocess")
        )
        assert 0 < total_s <= request_line["total_s"] * 1.01


def test_a_deadline_is_met_or_rejected_at_once(either):
    body = {"prompt": PROMPT, "inference_steps": 20}
    kept = either.post("/t2i", json=body | {"deadline_ms": 240_000})
    assert kept.status_code == 200
    joined_before = num_joined(either)
    # Sixteen large images in four slots: no machine finishes them in this time, but a busy one may need it to reject
    # them.
    large = {"inference_steps": 200, "n": 16, "width": 256, "height": 256, "deadline_ms": 2000}
    rejected = either.post("/t2i", json=body | large)
    assert rejected.status_code == 429
    assert rejected.json()["error"]["code"] == "deadline_unmeetable"
    assert "even on an idle server" in rejected.json()["error"]["message"]
    assert num_joined(either) == joined_before  # it never had a slot


def test_a_stream_has_progress_and_previews(either):
    body = {"prompt": PROMPT, "seed": 3, "stream": True, "partial_images": 2, "inference_steps": 12}
    with either.stream("POST", "/t2i", json=body) as answer:
        lines = answer.read().decode().splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    # A slow stream skips progress events, but no preview.
    assert (set(names), names[-1]) == ({"progress", "preview", "finished"}, "finished")
    assert names.count("preview") == 2
    finished = json.loads(lines[lines.index("event: finished") + 1].removeprefix("data: "))
    plain = either.post("/t2i", json={k: v for k, v in body.items() if k not in ("stream", "partial_images")})
    streamed = pixels(base64.b64decode(finished["images"][0]["b64_json"]))
    assert np.abs(streamed - pixels(plain.content)).max() <= 1


def num_in_flight(client):
    """Images that have joined and not departed, including those of killed engines, which never depart."""
    return num_joined(client) - metric(client, "noria_departures_total")


def test_hundreds_of_disconnecting_clients_leak_nothing(client, server):
    """They disconnect at random: before the request is read, in the queue, between steps, in the middle of a stream."""
    (frontend,) = server.children("frontend")
    rng = random.Random(7)

    def cancelled():
        return metric(client, "noria_requests_total", 'outcome="cancelled"')

    gauges = ("noria_slots_used", "noria_queue_depth", "noria_requests_in_flight")

    def is_idle():
        return [metric(client, name) for name in gauges] == [0, 0, 0]

    client.post("/t2i", json={"prompt": PROMPT})
    wait_until(is_idle)  # gauges fall after the response was sent
    files_before, in_flight_before, cancelled_before = frontend.num_fds(), num_in_flight(client), cancelled()

    def send_and_disconnect(request, wait_s):
        with open_request(server.port, request) as caller:
            if "stream" in request:  # make sure that some requests are read before they disconnect
                assert caller.recv(1)
            time.sleep(wait_s)

    with concurrent.futures.ThreadPoolExecutor(24) as callers:
        pending = []
        for k in range(300):
            request = {
                "prompt": PROMPT,
                "seed": k,
                "inference_steps": rng.choice([4, 50, 200]),
                "n": rng.choice([1, 1, 3]),
            }
            request |= {"stream": True, "partial_images": 2} if rng.random() < 0.3 else {}
            wait_s = rng.choice([0.0, 0.02, 0.1, 0.4]) * rng.random()
            pending.append(callers.submit(send_and_disconnect, request, wait_s))
    for each in pending:
        each.result()
    # No connection and no image is left; the server may still be reading some requests.
    wait_until(
        lambda: is_idle() and num_in_flight(client) == in_flight_before and frontend.num_fds() <= files_before + 2
    )
    # the others were rejected, finished, or disconnected before their request was read
    assert cancelled() - cancelled_before > 30
    assert client.post("/t2i", json={"prompt": PROMPT, "inference_steps": 1}).status_code == 200
