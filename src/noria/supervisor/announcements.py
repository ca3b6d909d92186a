"""The supervisor's announcements: the banner on stdout once the server is ready, and states to a service manager."""

import contextlib
import os
import shlex
import socket
import threading
from collections.abc import Sequence

from noria.observe.logs.writer import write_all
from noria.protocol.model_spec import ModelSpec
from noria.protocol.text import EncoderModelSpec

_STDOUT = 1

_FIRST_COMMANDS = {
    "diffusion": ("/t2i", '{"prompt": "a red circle above a blue square"}', " -o image.png"),
    "encoder": ("/v1/embeddings", '{"input": "a red circle above a blue square"}', ""),
}
"""By kind of model: the route, the body, and where the response goes."""


def ready_banner(took_s: float, models: Sequence[ModelSpec], url: str, *, has_api_keys: bool) -> str:
    """Return the banner: the server's pages at `url`, and a first command for each kind of model.

    The command has an API key if the server needs one. A browser has no URL for a Unix socket, so its banner has only
    commands.
    """
    auth_option = '-H "authorization: Bearer $NORIA_API_KEY" ' if has_api_keys else ""
    kinds, names = list(dict.fromkeys(spec.kind for spec in models)), ", ".join(spec.name for spec in models)
    pages = f"  {url}/       generate images in a browser\n" if "diffusion" in kinds else ""
    pages += f"  {url}/text   try the text encoder in a browser\n" if "encoder" in kinds else ""
    pages += f"  {url}/live   watch the running batch\n  {url}/docs   the HTTP API\n\n"
    target = url
    if url.startswith("unix:"):
        pages, target = "", f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    usable = {spec.kind for spec in models if not isinstance(spec, EncoderModelSpec) or spec.task == "embedding"}
    commands = [
        f"  curl -s {target}{path} -H 'content-type: application/json' {auth_option}-d '{body}'{output}\n"
        for path, body, output in (_FIRST_COMMANDS[kind] for kind in kinds if kind in usable)
    ]
    return f"\nnoria: ready after {took_s:.1f} s, serving {names} on {url}\n\n{pages}{''.join(commands)}\n"


def print_ready_banner(banner: str) -> None:
    """Write `banner` to stdout from a thread of its own, since whatever reads stdout may be slow or gone."""

    def write() -> None:
        with contextlib.suppress(OSError):
            write_all(_STDOUT, banner.encode())

    threading.Thread(target=write, name="ready banner", daemon=True).start()


def notify(state: str) -> None:
    """Send `state`, such as READY=1, to the service manager that NOTIFY_SOCKET names, as sd_notify(3) says.

    Without the variable nothing is sent.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)  # one that does not read must not keep the server from stopping
            manager.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            manager.send(state.encode())
