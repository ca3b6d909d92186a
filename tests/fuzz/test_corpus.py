"""The inputs that fuzzing has kept, and its seeds, show no defect. `make fuzz` searches for more."""

import pathlib
import re

import pytest

from fuzz.in_process_server import InProcessServer
from fuzz.targets import TARGETS

CORPUS = pathlib.Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted_and_the_corpus_shows_no_defect(name):
    target = TARGETS[name]
    with target.open() as run:
        rejected = [seed for seed in target.seeds() if not run(seed)]
        for file in sorted((CORPUS / name).glob("*")):
            run(file.read_bytes())
    assert rejected == []


def test_every_route_is_fuzzed():
    with InProcessServer() as server:
        routes = server.app.routes
    inputs = [*TARGETS["requests"].seeds(), *(file.read_bytes() for file in (CORPUS / "requests").iterdir())]
    paths = {found[1].decode() for each in inputs if (found := re.match(rb"[A-Z]+ ([!->@-~]+)", each))}
    assert [route.path for route in routes if not any(map(route.path_regex.match, paths))] == []
