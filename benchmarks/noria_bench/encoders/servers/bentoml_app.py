"""BentoML over the encoder. A process: `python -m noria_bench.encoders.servers.bentoml_app JOB`.

It supervises the processes of `bentoml_service`.
"""

import os
import sys
import tempfile

from noria_bench.encoders.servers.job import JOB_VARIABLE, job_argument
from noria_bench.targets.process_tree import kill_tree_on_sigterm


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = job_argument()
    home = tempfile.mkdtemp(prefix="noria-bentoml-")
    kill_tree_on_sigterm(home)
    os.environ |= {JOB_VARIABLE: sys.argv[1], "BENTOML_HOME": home, "BENTOML_DO_NOT_TRACK": "True", "TMPDIR": home}
    # Read TMPDIR again.
    tempfile.tempdir = None

    # Reads the environment.
    import bentoml

    bentoml.serve(
        "noria_bench.encoders.servers.bentoml_service:Encoder", host="127.0.0.1", port=job.port, blocking=True
    )


if __name__ == "__main__":
    main()
