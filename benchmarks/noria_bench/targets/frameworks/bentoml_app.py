"""BentoML over diffusers' pipeline, with its adaptive batching. A process: `python -m
noria_bench.targets.frameworks.bentoml_app JOB`.

It supervises the processes of `bentoml_services`.
"""

import os
import sys
import tempfile

from noria_bench.targets.pipeline_generator import read_job
from noria_bench.targets.process_tree import kill_tree_on_sigterm

JOB_VARIABLE = "NORIA_TARGET_JOB"


def serve_service(variable: str, service: str, port: int) -> None:
    """Serve a BentoML service, `MODULE:CLASS`, until SIGTERM; its processes find the job in `variable`."""
    home = tempfile.mkdtemp(prefix="noria-bentoml-")
    kill_tree_on_sigterm(home)
    os.environ |= {
        # BentoML's processes import the services; their command lines are BentoML's own.
        variable: sys.argv[1],
        "BENTOML_HOME": home,
        "BENTOML_DO_NOT_TRACK": "True",
        # For its sockets and metrics.
        "TMPDIR": home,
    }
    # Read TMPDIR again.
    tempfile.tempdir = None

    # Reads the environment.
    import bentoml

    bentoml.serve(service, host="127.0.0.1", port=port, blocking=True)


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    serve_service(JOB_VARIABLE, "noria_bench.targets.frameworks.bentoml_services:Front", read_job().port)


if __name__ == "__main__":
    main()
