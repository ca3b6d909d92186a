"""Triton with a model that imports what the models of the parts do: `python -m noria_bench.gpu.triton_probe PORT`.

It is ready if the server, its libraries, the Python backend and the model's packages work together.
"""

import os
import pathlib
import signal
import sys
import tempfile
import threading
from typing import Any

from noria.protocol.process_signals import die_with_parent
from noria_bench.targets.process_tree import kill_tree_on_sigterm
from noria_bench.targets.triton import find_triton, model_code, serve_models

# On a cold disk, torch takes half a minute.
_LIMIT_S = 90.0
_CONFIG = """name: "probe"
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""


class TritonPythonModel:
    """A model that is never called."""

    def initialize(self, _: dict[str, str]) -> None:
        """Compute on the device, if there is one."""
        import torch

        torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu").sum().item()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return nothing."""
        return [None for _ in requests]


def main() -> None:
    """Serve until SIGTERM, or until it takes so long that something hangs."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="noria-triton-"))
    kill_tree_on_sigterm(str(folder))
    die_with_parent()
    limit = threading.Timer(_LIMIT_S, os.kill, (os.getpid(), signal.SIGTERM))
    limit.daemon = True
    limit.start()
    code = model_code("noria_bench.gpu.triton_probe", isolated=False)
    files = {"probe/config.pbtxt": _CONFIG, "probe/1/model.py": code}
    serve_models(find_triton(), sys.executable, files, folder, int(sys.argv[1]))


if __name__ == "__main__":
    main()
