"""A server behind real proxies, nginx and HAProxy (Debian packages of these names), configured as their users do."""

import concurrent.futures
import contextlib
import csv
import html.parser
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse

import httpx
import pytest

from noria.testing.server import reserve_port, running_process
from uploads import b64, file_of, photo
from waiting import wait_until

SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has both, also for users without it in PATH
NGINX, HAPROXY = shutil.which("nginx", path=SBIN), shutil.which("haproxy", path=SBIN)
pytestmark = [
    pytest.mark.slow,  # two servers, two proxies and long requests: a minute
    pytest.mark.skipif(NGINX is None or HAPROXY is None, reason="needs Debian's nginx and haproxy"),
]
PROMPT = "a red circle above a blue square"
LONG = {"prompt": PROMPT, "inference_steps": 200, "guidance_scale": 5, "n": 4}  # ends only if somebody leaves
CANCELLED = 'noria_requests_total{model="noria-shapes",outcome="cancelled"'
NGINX_CONFIG = """
daemon off; master_process off; error_log {folder}/error.log; pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  client_max_body_size 32m;
  upstream noria {{ server 127.0.0.1:{server}; keepalive 8; }}
  proxy_http_version 1.1;
  proxy_read_timeout 300s;
  server {{
    listen 127.0.0.1:{kept_alive};
    proxy_set_header Connection ""; proxy_set_header Host $http_host; proxy_set_header X-Forwarded-For $remote_addr;
    location / {{ proxy_pass http://noria; }}
  }}
  server {{
    listen 127.0.0.1:{below_path};
    proxy_set_header Connection ""; proxy_set_header Host $http_host; proxy_set_header X-Forwarded-Prefix /images;
    location /images/ {{ proxy_pass http://noria/; }}
  }}
  server {{
    listen 127.0.0.1:{http10};
    location / {{ proxy_http_version 1.0; proxy_pass http://127.0.0.1:{server}; }}
  }}
}}
"""
# `option httpchk` without more sends HTTP/1.0 without Host.
HAPROXY_CONFIG = """
global
  maxconn 256
defaults
  mode http
  option abortonclose
  timeout connect 10s
  timeout client 300s
  timeout server 300s
  timeout check 10s
  default-server check inter 300ms fall 1 rise 1
frontend web
  bind 127.0.0.1:{haproxy}
  stats enable
  stats uri /of-haproxy
  default_backend gets
backend gets
  option httpchk GET /readyz
  server noria 127.0.0.1:{server}
backend options
  option httpchk
  server noria 127.0.0.1:{server}
backend heads
  option httpchk HEAD /healthz
  server noria 127.0.0.1:{server}
"""


@contextlib.contextmanager
def proxies(server_port, folder):
    """The URLs of nginx (`kept_alive`, `below_path`, `http10`) and of HAProxy (`haproxy`) before a server's port."""
    with contextlib.ExitStack() as stack:
        names = ("kept_alive", "below_path", "http10", "haproxy")
        ports = {name: stack.enter_context(reserve_port()) for name in names}
    places = ports | {"server": server_port, "folder": folder}
    (folder / "nginx.conf").write_text(NGINX_CONFIG.format(**places))
    (folder / "haproxy.cfg").write_text(HAPROXY_CONFIG.format(**places))
    commands = (
        [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")],
        [HAPROXY, "-db", "-f", str(folder / "haproxy.cfg")],
    )
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.terminate)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        for url in (urls["kept_alive"], urls["haproxy"]):
            wait_until(lambda url=url: httpx.get(f"{url}/readyz").status_code == 200, ignoring=(httpx.TransportError,))
        yield urls


@contextlib.contextmanager
def served(folder):
    """A server, and the URLs of proxies before it."""
    command = [sys.executable, "-m", "noria", "serve", "bundled", "--slots", "4", "--threads", "1"]
    command += ["--data-dir", str(folder), "--drain-s", "280"]
    with running_process(lambda port: [*command, "--port", str(port)]) as server, proxies(server.port, folder) as urls:
        yield server, urls


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with served(tmp_path_factory.mktemp("proxies")) as found:
        yield found


@pytest.fixture(scope="module")
def urls(both):
    return both[1]


@pytest.fixture
def direct(both):
    """A client that asks the server itself."""
    with httpx.Client(base_url=f"http://127.0.0.1:{both[0].port}", timeout=280) as client:
        yield client


def metric(client, name):
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def checks(urls):
    """Return the result of HAProxy's checks of each backend."""
    lines = httpx.get(f"{urls['haproxy']}/of-haproxy;csv").text.removeprefix("# ").splitlines()
    rows = [row for row in csv.DictReader(lines) if row["svname"] == "noria"]
    return {row["pxname"]: (row["status"], row["check_code"]) for row in rows}


def test_plain_checks_of_haproxy_keep_the_server_in_service(urls):
    expected = {"gets": ("UP", "200"), "options": ("UP", "204"), "heads": ("UP", "200")}
    wait_until(lambda: "" not in {code for _, code in checks(urls).values()})
    assert checks(urls) == expected


@pytest.mark.parametrize("proxy", ["kept_alive", "http10", "haproxy"])
def test_streams_pass_through_proxies_as_they_are_written(urls, proxy):
    body = LONG | {"stream": True, "n": 1, "inference_steps": 60}
    times = {}
    with httpx.stream("POST", f"{urls[proxy]}/t2i", json=body, timeout=280) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            times.setdefault(line, time.monotonic())
    total_s = max(times.values()) - min(times.values())
    assert "event: finished" in times
    arrived = sorted(times.values())
    # A buffered stream arrives at once: here the middle of its lines comes before its last tenth.
    assert arrived[len(arrived) // 2] < arrived[0] + 0.9 * total_s
    assert total_s > 0.1


class Links(html.parser.HTMLParser):
    """The targets of a page's links, images, scripts and style sheets."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("href", "src") and tag not in ("base",)]


@pytest.mark.parametrize("page", ["", "live", "docs", "text", "models", "deployments", "lineage", "drift"])
def test_pages_below_a_path_of_nginx_have_links_that_lead_below_it(urls, page):
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        url = f"{urls['below_path']}/images/{page}"
        response = client.get(url)
        assert response.status_code == 200
        targets = {urllib.parse.urljoin(url, link).partition("#")[0] for link in Links(response.text).found}
        inside = {target for target in targets if target.startswith(urls["below_path"])}
        assert len(inside) > 5
        assert not [target for target in inside if not target.startswith(f"{urls['below_path']}/images/")]
        assert {target: client.get(target).status_code for target in inside} == dict.fromkeys(inside, 200)


def test_urls_of_jobs_below_a_path_of_nginx_lead_below_it(urls):
    url = f"{urls['below_path']}/images/v1/jobs"
    job = httpx.post(url, json={"input": {"prompt": PROMPT, "inference_steps": 2}}, timeout=60).json()
    assert job["urls"]["get"].startswith(f"{url}/")
    wait_until(lambda: httpx.get(job["urls"]["get"]).json()["status"] == "succeeded")
    (image,) = httpx.get(job["urls"]["get"]).json()["output"]
    assert httpx.get(image).headers["content-type"] == "image/png"


@pytest.mark.parametrize("proxy", ["kept_alive", "http10", "haproxy"])
@pytest.mark.parametrize("body", [LONG, LONG | {"stream": True}, LONG | {"image": b64(file_of(photo((400, 300))))}])
def test_a_client_that_leaves_a_proxy_frees_the_device(urls, direct, proxy, body):
    joined, cancelled = metric(direct, "noria_joins_total"), metric(direct, CANCELLED)
    address = urllib.parse.urlsplit(urls[proxy]).netloc
    with contextlib.closing(http.client.HTTPConnection(address, timeout=280)) as connection:
        connection.request("POST", "/t2i", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: metric(direct, "noria_joins_total") > joined)
        assert metric(direct, CANCELLED) == cancelled
    wait_until(lambda: metric(direct, CANCELLED) == cancelled + 1)
    wait_until(lambda: metric(direct, "noria_slots_used") == 0)


def test_a_signal_to_all_processes_loses_no_request_behind_a_proxy(tmp_path):
    body = {"prompt": PROMPT, "inference_steps": 60}
    with served(tmp_path) as (server, urls), concurrent.futures.ThreadPoolExecutor(4) as users:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as direct:
            paths = (f"{urls['kept_alive']}/t2i", f"{urls['haproxy']}/t2i", f"{urls['http10']}/t2i")
            pending = [users.submit(httpx.post, path, json=body, timeout=280) for path in paths]
            pending.append(users.submit(httpx.post, paths[0], json=body | {"stream": True}, timeout=280))
            wait_until(lambda: metric(direct, "noria_joins_total") >= len(pending))
        for process in (*server.process.children(), server.process):  # as systemd does by default
            process.send_signal(signal.SIGTERM)
        responses = [each.result() for each in pending]
        assert [response.status_code for response in responses] == [200] * len(pending)
        assert "event: finished" in responses[-1].text
        assert server.process.wait(120) == 0
