"""BentoML over diffusers' own pipeline, with its adaptive batching. A process: `python -m noria_bench.targets.frameworks.bentoml_app JOB`.

It supervises the processes of `bentoml_services.py`.
"""

import os
import sys
import tempfile

from noria_bench.targets.pipeline_generator import read_job
from noria_bench.targets.process_tree import kill_tree_on_sigterm

JOB_VARIABLE = "NORIA_TARGET_JOB"


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    home = tempfile.mkdtemp(prefix="noria-bentoml-")
    kill_tree_on_sigterm(home)
    os.environ |= {
        JOB_VARIABLE: sys.argv[1],  # BentoML's processes import the services and have a command line of its own
        "BENTOML_HOME": home,
        "BENTOML_DO_NOT_TRACK": "True",
        "TMPDIR": home,  # its sockets and metrics
    }
    tempfile.tempdir = None  # read TMPDIR again

    import bentoml  # reads the environment

    bentoml.serve(
        "noria_bench.targets.frameworks.bentoml_services:Front", host="127.0.0.1", port=job.port, blocking=True
    )


if __name__ == "__main__":
    main()
