"""`noria trace`: what made what an endpoint serves, a model or an image, and what was made from data."""

import argparse
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noria.cli.parser import Parser, add_command
from noria.cli.registry.common import (
    add_json_flag,
    add_registry_settings,
    as_json,
    format_time,
    registry_of,
    warn_if_cut,
)
from noria.observe.terminal_text import escape_for_terminal, escape_in_json

if TYPE_CHECKING:
    from noria.images.metadata import GenerationMetadata
    from noria.registry.lineage.nodes import DatasetNode, DeploymentNode, Node, RunNode
    from noria.registry.lineage.trace import Direction, Graph

_LATE_S = 3600.0  # seconds between the time that a run's events say and their arrival


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_command(commands, "trace", run, "WHAT", "print what made a deployed model, an image or data")
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="an endpoint, deployment:NUMBER, MODEL[@NUMBER|@ALIAS], an image file, sha256:DIGEST (its first 8 digits "
        "will do), data as URI@VERSION, or a run's id",
    )
    parser.add_argument("--down", action="store_true", help="what was made from it instead")
    form = parser.add_mutually_exclusive_group()
    add_json_flag(form)
    form.add_argument(
        "--openlineage", action="store_true", help="print the events for another catalog of lineage, one a line"
    )
    add_registry_settings(parser)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Print the chain of runs, their steps and the versions of data that made something, back to where it begins.

    With --down, all that was made from it: which models saw this data?
    """
    from noria.images.metadata_io import read_metadata
    from noria.registry.lineage.export import export_events
    from noria.registry.lineage.trace import trace
    from noria.registry.lineage.trace_subjects import find_image_subjects, find_subjects

    direction: Direction = "down" if arguments.down else "up"
    # A name too long for a path is no file.
    image = read_metadata(pathlib.Path(arguments.what)) if os.path.isfile(arguments.what) else None
    with registry_of(arguments) as engine, engine.connect() as connection:
        if image is None:
            subjects = find_subjects(connection, arguments.what, direction)
        else:
            subjects = find_image_subjects(connection, image, arguments.what, direction)
        graph = trace(connection, subjects, direction)
        if arguments.openlineage:
            for event in export_events(connection, graph):
                print(escape_in_json(event))
            warn_if_cut(graph)
            return 0
    if arguments.json:
        print(as_json(graph))
    else:
        print("\n".join(format_graph(graph)))
        if image is not None:
            print("".join(f"{escape_for_terminal(line)}\n" for line in format_parts(image)), end="")
    return 0


def format_parts(image: "GenerationMetadata") -> Iterator[str]:
    """Yield a line for each file beside the model that made an image, with its digest: LoRAs, refiner, images."""
    for lora in image.loras:
        yield f"LoRA {lora.name}  {lora.digest or 'digest not stated'}, weight {lora.weight:g}"
    for control in image.controls:
        yield f"ControlNet {control.name}  {control.digest or 'digest not stated'}, scale {control.scale:g}"
    if (adapter := image.ip_adapter) is not None:
        yield f"IP-Adapter {adapter.name}  {adapter.digest or 'digest not stated'}, scale {adapter.scale:g}"
        yield f"image of the IP-Adapter  {adapter.image_digest}"
    for name, digest in (("start image", image.image_digest), ("mask", image.mask_digest)):
        if digest is not None:
            yield f"{name}  {digest}"
    for reference in image.reference_images:
        yield f"reference image  {reference.digest}"
    if image.refiner is not None:
        digest = image.refiner.digest or "digest not stated"
        yield f"refiner {image.refiner.name}  {digest}, from {image.refiner.start:g}"


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
    from noria.registry.lineage.nodes import DatasetNode, DeploymentNode, EndpointNode, ModelNode

    match node:
        case EndpointNode():
            return [f"endpoint {node.name}"]
        case DeploymentNode():
            return [_deployment_text(node)]
        case ModelNode():
            return [f"model {', '.join(node.names)}  {node.digest}"]
        case DatasetNode():
            return _dataset_texts(node)
        case _:
            return _run_texts(node)


def _deployment_text(node: "DeploymentNode") -> str:
    why = f": {node.created.why}" if node.created.why else ""
    state = node.state.replace("_", " ")
    return f"deployment {node.number}  {state}, {format_time(node.created.at)} by {node.created.by}{why}"


def _dataset_texts(node: "DatasetNode") -> list[str]:
    version = "version not stated" if not node.version else node.digest or f"version {node.version}, without sha256"
    return [f"dataset {node.namespace} {node.name}  {version}", *(f"at {uri}" for uri in node.uris)]


def _run_texts(node: "RunNode") -> list[str]:
    took = "" if node.ended_at is None else f", {_format_duration(node.ended_at - node.started_at)}"
    status = node.status.replace("_", " ")
    texts = [f"run {node.job_namespace}/{node.job_name}  {status}, {format_time(node.started_at)}{took}"]
    texts.append(f"id {node.run_id}")
    for name, values in (("parameters", node.params), ("metrics", node.metrics)):
        if values:
            texts.append(f"{name} " + ", ".join(f"{key}={value}" for key, value in values.items()))
    if node.is_shortened:
        texts.append("… more or longer values are in its events")
    texts += [f"error {node.error}"] if node.error else []
    is_late = abs(node.received_at - node.started_at) > _LATE_S
    received = f", received {format_time(node.received_at)}" if is_late else ""
    texts.append(f"sent by {node.sender or 'none whose events count'}{received}")
    if (struck := node.struck_out) is not None:
        why = f": {struck.last.why}" if struck.last.why else ""
        texts.append(f"{struck.num_events} events struck out, {format_time(struck.last.at)} by {struck.last.by}{why}")
    return texts


def _format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"
