"""The banner on stdout that says where the server can be reached, once it is ready."""

import contextlib
import shlex
import threading

from noria.observe.logs.writer import write_all

_STDOUT = 1


def ready_banner(took_s: float, models: str, url: str, *, has_api_keys: bool) -> str:
    """Return the banner: the server's pages at `url`, and a first command, with an API key if the server needs one.

    A browser has no URL for a Unix socket, so its banner has only the command.
    """
    auth_option = '-H "authorization: Bearer $NORIA_API_KEY" ' if has_api_keys else ""
    pages = (
        f"  {url}/       generate images in a browser\n"
        f"  {url}/live   watch the running batch\n"
        f"  {url}/docs   the HTTP API\n\n"
    )
    target = url
    if url.startswith("unix:"):
        pages, target = "", f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    return (
        f"\nnoria: ready after {took_s:.1f} s, serving {models} on {url}\n\n"
        f"{pages}"
        f"  curl -s {target}/t2i -H 'content-type: application/json' {auth_option}"
        '-d \'{"prompt": "a red circle above a blue square"}\' -o image.png\n\n'
    )


def print_ready_banner(banner: str) -> None:
    """Write `banner` to stdout from a thread of its own, since whatever reads stdout may be slow or gone."""

    def write() -> None:
        with contextlib.suppress(OSError):
            write_all(_STDOUT, banner.encode())

    threading.Thread(target=write, name="ready banner", daemon=True).start()
