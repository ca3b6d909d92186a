"""The commands of `docs/coming-from.md`, by a front end of a fake engine; those that serve are parsed."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import msgspec
import numpy as np
from safetensors.numpy import save_file

from noria.cli.main import _parse
from noria.cli.parser import config_from
from noria.config import Config, EngineConfig
from noria.protocol.diffusion import SecondPass

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "coming-from.md"


def test_the_commands_of_the_tours_work(serve, new_engine, tmp_path):
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    to_serve = [block for block in blocks if block.startswith("noria serve")]
    for block in to_serve:
        assert config_from(_parse(shlex.split(block.replace("\\\n", " "))[1:])).model == "dreamshaper.safetensors"
    for name in ("watercolor", "grainy"):
        save_file({"emb_params": np.zeros((2, 768), np.float32)}, tmp_path / f"{name}.safetensors")
    engine = new_engine()
    config = Config(engine=EngineConfig(loras=(str(tmp_path),), embeddings=(str(tmp_path),)))
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    with serve(config, engine) as (url, _):
        for block in blocks:
            if block not in to_serve:
                commands = block.replace("http://127.0.0.1:8000", url)
                subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", commands],
                    check=True, cwd=tmp_path, env=os.environ | {"PATH": path},
                )  # fmt: skip
    a1111, larger, again, first, second, streamed = (request.payload for request in engine.submitted)
    assert (a1111.prompt_syntax, [each.name for each in a1111.loras]) == ("a1111", ["watercolor"])
    assert [each.name for each in a1111.embeddings] == ["grainy"]
    assert again == msgspec.structs.replace(a1111, partial_images=0)  # which are for /progress
    assert larger.second_pass == SecondPass(96, 72, 20, 0.6)
    assert [each.weight for each in first.loras] == [0.8]
    assert (second.strength, streamed.prompt) == (0.6, "a red circle")
