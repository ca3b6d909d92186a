"""The card of a version, as the hub and other catalogs of models read it: Markdown below fields in YAML. Pure.

The fields are those of huggingface_hub's `ModelCardData`; `noria` in it has what these have no place for.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from huggingface_hub import ModelCardData

from noria.observe.terminal_text import UNPRINTABLE
from noria.registry.lineage.nodes import DatasetNode, DeploymentNode, RunNode
from noria.registry.lineage.trace import Graph
from noria.registry.versions import Version

_LIBRARIES = {"diffusion": ("diffusers", "text-to-image"), "encoder": ("transformers", None)}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+!|~&])")


def model_card(version: Version, above: Graph, below: Graph) -> str:
    """Return the card of a version, from its traces up, to what made it, and down, to where it serves."""
    data = [node for node in above.nodes if isinstance(node, DatasetNode)]
    runs = [node for node in above.nodes if isinstance(node, RunNode)]
    deployments = [node for node in below.nodes if isinstance(node, DeploymentNode) and node.version == version.name]
    library, task = _LIBRARIES.get(version.kind, (None, None))
    card = ModelCardData(
        model_name=version.model,
        library_name=library,
        pipeline_tag=task,
        datasets=sorted({_printable(node.name) for node in data}) or None,
        tags=list(version.tags) or None,
        noria={
            "version": version.number,
            "digest": version.digest,
            "fingerprint": version.fingerprint,
            "source": _printable(version.source),
            "revision": version.revision and _printable(version.revision),
            "runs": [run.run_id for run in runs],
        },
    )
    return "\n".join(["---", card.to_yaml(), "---", "", *_lines(version, runs, data, deployments), ""])


def _lines(
    version: Version, runs: Sequence[RunNode], data: Sequence[DatasetNode], deployments: Sequence[DeploymentNode]
) -> Iterator[str]:
    yield f"# {_text(version.name)}"
    yield ""
    yield from _table(
        ("", ""),
        [
            ("SHA-256 of all files", version.digest.removeprefix("sha256:")),
            ("files", f"{version.num_files}, {version.size_bytes} bytes"),
            ("source", version.source if version.revision is None else f"{version.source} at {version.revision}"),
            ("added", f"{_time(version.added.at)} by {version.added.by}"),
            ("why", version.added.why),
            ("aliases", ", ".join(version.aliases)),
            ("deployed to", ", ".join(f"{each.endpoint} ({each.state.replace('_', ' ')})" for each in deployments)),
        ],
    )
    if not runs and not data:
        yield from ("", "Nothing is recorded about how it was made.")
    if runs:
        yield from ("", "## How it was made", "")
        yield from _table(
            ("run", "began", "parameters", "metrics"),
            [
                (f"{run.job_namespace}/{run.job_name}", _time(run.started_at), _pairs(run.params), _pairs(run.metrics))
                for run in runs
            ],
        )
    if data:
        yield from ("", "## Data", "")
        yield from _table(
            ("dataset", "version", "found at"),
            [(f"{node.namespace} {node.name}", node.version or "not stated", ", ".join(node.uris)) for node in data],
        )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table; rows of a name without a value are left out."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        if any(row[1:]):
            yield f"| {' | '.join(map(_text, row))} |"


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _text(text: str) -> str:
    """Return text that means nothing to Markdown or HTML, in one line."""
    return _MARKDOWN.sub(r"\\\1", _printable(text))


def _printable(text: str) -> str:
    return UNPRINTABLE.sub(" ", text)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
