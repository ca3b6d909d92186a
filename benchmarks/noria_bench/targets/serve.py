"""`noria bench serve TARGET`: runs a target in the foreground, to be loaded by hand with ab or curl.

It prints commands that load the target, and stops the server on Ctrl-C or SIGTERM.
"""

import contextlib
import pathlib
import shlex
import socket
import sys
import tempfile

import psutil

from noria.config import Config
from noria.errors import ConfigError
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.process_signals import sigterm_interrupts
from noria.testing.server import RunningServer
from noria_bench.load.protocols import encode_request
from noria_bench.load.workload import caption
from noria_bench.targets.catalog import TARGETS, Target, TargetSettings
from noria_bench.targets.server import running_target

# Not the default of `noria serve`, so that both can run.
DEFAULT_PORT = 8001


def main(config: Config, name: str, port: int = DEFAULT_PORT, settings: TargetSettings | None = None) -> int:
    """Serve the target on loopback `port` (0: a free one) until Ctrl-C; returns 0, or 1 if the server ended by itself.

    Raises:
        ConfigError: the port is in use, or the framework is not installed.
        ModelError: the model cannot be served.

    """
    target = TARGETS[name]
    _check_free(port)
    spec = open_model_of(DiffusionModelSpec, config.model, config.engine)
    with tempfile.TemporaryDirectory(prefix="noria-body-") as folder, sigterm_interrupts():
        body = pathlib.Path(folder) / "body.json"
        body.write_bytes(encode_request(target.protocol, {"prompt": caption(1), "seed": 1}))
        try:
            with running_target(target, spec, config, settings, port=port or None) as server:
                print(usage_text(target, server.port, body), flush=True)
                return _wait_for_end(server)
        except KeyboardInterrupt:
            return 0
        except RuntimeError as error:
            print(f"noria: error: {error}", file=sys.stderr)
            return 1


def usage_text(target: Target, port: int, body: pathlib.Path) -> str:
    """Commands that load `target` on `port`; `body` is a file with a request."""
    url, file = f"http://127.0.0.1:{port}{target.path}", shlex.quote(str(body))
    return f"""{target.name} serves {url} until Ctrl-C. Load it with one of

  curl -f -o image.png -H 'Content-Type: application/json' -d @{file} {url}
  ab -n 40 -c 8 -l -s 600 -p {file} -T application/json {url}

ab counts an error with a body as a success; it prints a line "Non-2xx responses" if there were errors.
"""


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        # Connections that are closing do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} is not available ({error}); choose another with --port N, or --port 0 for a free one."
            ) from error


def _wait_for_end(server: RunningServer) -> int:
    """Wait until the server ends by itself, which is a failure; returns 1."""
    with contextlib.suppress(psutil.NoSuchProcess):
        server.process.wait()
    print("noria: error: the server ended; its stderr is above", file=sys.stderr)
    return 1
