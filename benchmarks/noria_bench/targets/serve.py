"""`noria bench serve TARGET`: any target in the foreground, for whoever wants to load it himself, with ab, Locust or curl.

It prints the lines to load it with, and stops the server on Ctrl-C or SIGTERM.
"""

import contextlib
import json
import pathlib
import shlex
import socket
import sys
import tempfile

import psutil

import noria_bench
from noria.config import Config
from noria.errors import ConfigError, did_you_mean, short_repr
from noria.models.catalog import open_model
from noria.protocol.process_signals import sigterm_interrupts
from noria_bench.load.workload import caption
from noria_bench.targets.catalog import TARGETS, Target, TargetSettings
from noria_bench.targets.server import RunningServer, running_target

_LOCUSTFILE = pathlib.Path(noria_bench.__file__).parent / "locustfiles" / "scenario2.py"  # locust wants the file

DEFAULT_PORT = 8001  # beside `noria serve` on its own


def main(config: Config, target: str, port: int = DEFAULT_PORT, settings: TargetSettings | None = None) -> int:
    """Serve `target` on loopback `port` (0: any free one) until Ctrl-C; 1 if it ended by itself, its own words are on stderr then.

    Raises:
        ConfigError: there is no such target, the port is taken, or the peer is not installed.
        ModelError: the model cannot be served.

    """
    if target not in TARGETS:
        raise ConfigError(
            f"{short_repr(target)} is no target; there are {', '.join(TARGETS)}.{did_you_mean(target, TARGETS)}"
        )
    _check_free(port)
    spec = open_model(config.model)
    with tempfile.TemporaryDirectory(prefix="noria-body-") as folder, sigterm_interrupts():
        body = pathlib.Path(folder) / "body.json"
        body.write_text(json.dumps({"prompt": caption(1), "seed": 1}), encoding="utf-8")
        try:
            with running_target(TARGETS[target], spec, config, settings, port=port or None) as server:
                print(usage_text(TARGETS[target], server.port, body), flush=True)
                return _wait_for_end(server)
        except KeyboardInterrupt:
            return 0
        except RuntimeError as error:
            print(f"noria: error: {error}", file=sys.stderr)
            return 1


def usage_text(target: Target, port: int, body: pathlib.Path) -> str:
    """What a user needs to load `target` on `port`; `body` is a file with a request."""
    host = f"http://127.0.0.1:{port}"
    url, file = host + target.path, shlex.quote(str(body))
    scenario = shlex.quote(str(_LOCUSTFILE))
    return f"""{target.name} serves {url} until Ctrl-C. Load it with one of

  curl -f -o image.png -H 'Content-Type: application/json' -d @{file} {url}
  ab -n 40 -c 8 -l -s 600 -p {file} -T application/json {url}
  NORIA_PATH={target.path} locust -f {scenario} --host {host}

ab counts an error with a body as a success: look at its line "Non-2xx responses", which is there if there were any.
"""


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do not count
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} cannot be had ({error}); choose another with --port N, or --port 0 for any free one."
            ) from error


def _wait_for_end(server: RunningServer) -> int:
    """Until it ends by itself: that is a failure."""
    with contextlib.suppress(psutil.NoSuchProcess):
        server.process.wait()
    print("noria: error: the server ended; its own words are above", file=sys.stderr)
    return 1
