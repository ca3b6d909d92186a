"""`noria trace`: what made what an endpoint serves, a model or an image, and what was made from data."""

import argparse
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noria.cli.parser import Parser, add_command
from noria.cli.registry.common import add_json_flag, add_registry_settings, as_json, format_time, registry_of
from noria.errors import RegistryError
from noria.observe.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from noria.registry.trace import DatasetNode, Graph, Node, NodeId, RunNode


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_command(commands, "trace", run, "WHAT", "print what made a deployed model, an image or data")
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="an endpoint, MODEL[@NUMBER|@ALIAS], an image file, sha256:DIGEST (its first 8 digits will do), data as "
        "URI@VERSION, or a run's id",
    )
    parser.add_argument("--down", action="store_true", help="what was made from it instead")
    add_json_flag(parser)
    add_registry_settings(parser)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Print the chain of runs, their steps and the versions of data that made something, back to where it begins.

    With --down, all that was made from it: which models saw this data?
    """
    from noria.registry.trace import trace

    with registry_of(arguments) as engine:
        subjects = _find(engine, arguments.what, down=arguments.down)
        with engine.connect() as connection:
            graph = trace(connection, subjects, "down" if arguments.down else "up")
    if arguments.json:
        print(as_json(graph))
    else:
        print("\n".join(format_graph(graph)))
    return 0


def _find(engine: "Engine", what: str, *, down: bool) -> "list[NodeId]":
    """Return what is to be traced: on the way up also an endpoint, before a model of the same name.

    Raises RegistryError and ImageFileError.
    """
    from noria.registry.model_store import ModelStore
    from noria.registry.run_events import parse_dataset
    from noria.registry.trace import NodeId, find_dataset, find_digest, find_endpoint, find_run

    if os.path.isfile(what):  # a name too long for a path is none
        return [NodeId("model", digest) for digest in _digests_of_image(ModelStore(engine), pathlib.Path(what))]
    with engine.connect() as connection:
        if what.startswith("sha256:"):
            return find_digest(connection, what)
        if _is_uuid(what):
            return [find_run(connection, what)]
        if "://" in what:
            return [find_dataset(connection, *parse_dataset(what)[0])]
        if not down and (endpoint := find_endpoint(connection, what)) is not None:
            return [endpoint]
    return [NodeId("model", ModelStore(engine).get(what).digest)]


def _digests_of_image(store: Any, file: pathlib.Path) -> list[str]:
    """Return the digests of the versions that may have made an image: those with the fingerprint in its metadata."""
    from noria.images.metadata_io import read_metadata

    metadata = read_metadata(file)
    if metadata.noria is None or metadata.model_version is None:
        raise RegistryError(f"{file}: another program than Noria wrote it, so its model is not known here.")
    found = store.by_fingerprint(metadata.model_version)
    if not found:
        raise RegistryError(
            f"{file}: its model {metadata.model} with the fingerprint {metadata.model_version} is not in the registry. "
            "Add the folder that made it: noria models add NAME FOLDER (for the model in the package: noria models add "
            "noria-shapes bundled)."
        )
    return sorted({version.digest for version in found})


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def format_graph(graph: "Graph") -> Iterator[str]:
    """Yield the lines of a tree below each subject. What is met again is not repeated."""
    below: dict[int, list[tuple[str, int]]] = {}
    for edge in graph.edges:
        below.setdefault(edge.start, []).append((edge.role, edge.to))
    shown: set[int] = set()
    for subject in range(graph.num_subjects):
        yield from _lines(graph, below, shown, subject)
    if not graph.edges:
        yield "  nothing is recorded about " + ("how it was made" if graph.direction == "up" else "what was made of it")
    if graph.is_cut:
        yield f"… and more: only {len(graph.nodes)} are shown"


def _lines(graph: "Graph", below: dict[int, list[tuple[str, int]]], shown: set[int], first: int) -> Iterator[str]:
    """Yield the lines of one tree, without recursion: a chain may be longer than Python's stack."""
    stack = [("", "", "", first)]  # what precedes the node's first line, and its others; its role
    while stack:
        head, rest, role, number = stack.pop()
        title, *details = _texts(graph.nodes[number])
        again = number in shown and number in below
        yield f"{head}{role}{escape_for_terminal(title)}{'  (as above)' if again else ''}"
        if number in shown:
            continue
        shown.add(number)
        children = below.get(number, [])
        for detail in details:
            yield f"{rest}{'│  ' if children else '   '}{escape_for_terminal(detail)}"
        for child_role, child in reversed(children):
            is_last = (child_role, child) == children[-1]
            branch, bar = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            stack.append((rest + branch, rest + bar, f"{child_role}: ", child))


def _texts(node: "Node") -> list[str]:
    """Return the title of a node, and further lines."""
    from noria.registry.trace import DatasetNode, EndpointNode, ModelNode

    match node:
        case EndpointNode():
            return [f"endpoint {node.name}"]
        case ModelNode():
            return [f"model {', '.join(node.names)}  {node.digest}"]
        case DatasetNode():
            return _dataset_texts(node)
        case _:
            return _run_texts(node)


def _dataset_texts(node: "DatasetNode") -> list[str]:
    version = "version not stated" if not node.version else node.digest or f"version {node.version}, without sha256"
    return [f"dataset {node.namespace} {node.name}  {version}", *(f"at {uri}" for uri in node.uris)]


def _run_texts(node: "RunNode") -> list[str]:
    took = "" if node.ended_at is None else f", {_format_duration(node.ended_at - node.started_at)}"
    texts = [f"run {node.job_namespace}/{node.job_name}  {node.status}, {format_time(node.started_at)}{took}"]
    texts.append(f"id {node.run_id}")
    for name, values in (("parameters", node.params), ("metrics", node.metrics)):
        if values:
            texts.append(f"{name} " + ", ".join(f"{key}={value}" for key, value in values.items()))
    return [*texts, *([f"error {node.error}"] if node.error else [])]


def _format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"
