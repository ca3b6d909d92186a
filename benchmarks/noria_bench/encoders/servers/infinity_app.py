"""Infinity over the checkpoint, by torch. A process: `python -m noria_bench.encoders.servers.infinity_app JOB`."""

import os

from noria_bench.encoders.servers.job import job_argument
from noria_bench.targets.process_tree import kill_tree_on_sigterm


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = job_argument()
    kill_tree_on_sigterm()
    os.environ |= {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}

    # Starts threads.
    import torch
    import uvicorn
    from infinity_emb import EngineArgs
    from infinity_emb.infinity_server import create_server

    checkpoint = job.files.checkpoint
    assert checkpoint is not None
    kind, _, index = checkpoint.device.partition(":")
    torch.set_num_threads(job.threads)
    engine = EngineArgs(
        model_name_or_path=checkpoint.spec.folder,
        served_model_name="model",
        engine="torch",
        device=kind,
        device_id=[int(index)] if index else [],
        dtype=checkpoint.precision,
        batch_size=job.settings.max_batch,
        bettertransformer=False,  # needs optimum, which needs another transformers
        trust_remote_code=False,
        compile=False,
        model_warmup=False,
    )
    app = create_server(engine_args_list=[engine], url_prefix="")
    uvicorn.run(app, host="127.0.0.1", port=job.port, loop="uvloop", http="httptools", log_level="warning")


if __name__ == "__main__":
    main()
