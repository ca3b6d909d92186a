"""`noria models`: adds, lists, shows, names and removes versions of models."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from noria.cli.parser import Parser, add_command, config_from
from noria.cli.registry.common import (
    add_json_flag,
    add_registry_settings,
    add_why_flag,
    as_json,
    change_of,
    format_size,
    format_table,
    format_time,
    registry_of,
    show_reading,
    warn_if_cut,
)
from noria.observe.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from noria.registry.model_store import ModelStore
    from noria.registry.versions import Version

_VERSION_HELP = "MODEL, MODEL@NUMBER, MODEL@ALIAS or MODEL@KEY=VALUE; by a tag or a model alone the latest version"


def add_to(commands: Any) -> list[Parser]:
    """Add the commands; returns their parsers."""
    models = commands.add_parser("models", help="add, list, name and remove versions of models")
    subcommands = models.add_subparsers(metavar="COMMAND", required=True)
    add = add_command(subcommands, "add", run_add, "NAME SOURCE", "add a version of a model")
    add.add_argument("name", metavar="NAME", help="of the model; it is created if it is new")
    add.add_argument(
        "source",
        metavar="SOURCE",
        help="a model folder, FILE.safetensors, bundled, minilm, hf://OWNER/NAME[/FILE.safetensors][@REVISION], "
        "mlflow:models:/NAME@ALIAS, mlflow:models:/NAME/NUMBER, or the URL of a folder, such as s3://BUCKET/FOLDER",
    )
    add.add_argument("--vae", metavar="FILE", default="", help="of a single file: the VAE in place of its own")
    add.add_argument(
        "--parts",
        metavar="FOLDER",
        action="append",
        default=[],
        help="of a transformer's single file: the folder, or hub id, with the model's other parts; may be repeated",
    )
    add.add_argument("--alias", metavar="ALIAS", help="let ALIAS name this version")
    add.add_argument(
        "--run", dest="run_id", metavar="RUN_ID", help="the run that made it, if its events do not name its digest"
    )
    add.add_argument(
        "--dataset",
        metavar="URI@VERSION",
        action="append",
        default=[],
        help="data that it was made from; may be repeated",
    )
    list_models = add_command(subcommands, "list", run_list, "[MODEL]", "list versions")
    list_models.add_argument("model", metavar="MODEL", nargs="?", help="only those of one model")
    list_models.add_argument("--removed", action="store_true", help="also those that are removed")
    list_models.add_argument("--tag", metavar="KEY=VALUE", action="append", default=[], help="only those with this tag")
    show = add_command(subcommands, "show", run_show, "VERSION", "print a version: its files, aliases and history")
    show.add_argument("version", metavar="VERSION", help=_VERSION_HELP)
    card = add_command(subcommands, "card", run_card, "VERSION", "print the card of a version, as the hub takes it")
    card.add_argument("version", metavar="VERSION", help=_VERSION_HELP)
    alias = add_command(subcommands, "alias", run_alias, "VERSION ALIAS", "let an alias name a version")
    alias.add_argument("version", metavar="VERSION", help=_VERSION_HELP)
    alias.add_argument("alias", metavar="ALIAS", help="such as prod; not a number")
    alias.add_argument("--delete", action="store_true", help="delete the alias of the model instead")
    tag = add_command(subcommands, "tag", run_tag, "VERSION KEY=VALUE…", "give a version tags")
    tag.add_argument("version", metavar="VERSION", help=_VERSION_HELP)
    tag.add_argument("tags", metavar="KEY=VALUE", nargs="+", help="such as stage=prod; it replaces one with this key")
    tag.add_argument("--delete", action="store_true", help="delete the tags instead")
    remove = add_command(subcommands, "remove", run_remove, "VERSION", "remove a version that nothing uses")
    remove.add_argument("version", metavar="VERSION", help="MODEL@NUMBER")
    parsers = [add, list_models, show, alias, tag, remove]
    for parser in parsers:
        add_json_flag(parser)
    parsers.append(card)
    for parser in parsers:
        add_registry_settings(parser)
    for parser in (add, alias, tag, remove):
        add_why_flag(parser)
    return parsers


def run_add(arguments: argparse.Namespace) -> int:
    """Add a folder as a version of a model.

    All of its files are read, and the SHA-256 of all is the version: the same content again is the same version. The
    files of a local folder stay where they are; those of other sources are copied to the folder models in data_dir,
    without pickles, and a checkpoint in a single file is converted to a folder in its folder checkpoints. Keep them
    there unchanged. If the command is killed, the same command completes the copy. The lineage in noria-lineage.jsonl,
    if the folder has one, and the run of MLflow are recorded, too.
    """
    from noria.folders import data_folder
    from noria.registry.lineage.run_events import parse_dataset
    from noria.registry.sources.read import read_source

    with _store(arguments, if_missing="create") as store:
        store.check_addition(arguments.name, arguments.alias, arguments.run_id)
    inputs = dict(map(parse_dataset, arguments.dataset))
    with show_reading() as on_read:
        folder = read_source(
            arguments.source,
            arguments.name,
            data_folder(config_from(arguments), os.environ),
            os.environ,
            lambda sentence: print(escape_for_terminal(sentence), file=sys.stderr),
            on_read=on_read,
            vae=arguments.vae,
            parts=arguments.parts,
        )
    with _store(arguments, if_missing="create") as store:
        version, was_there = store.add(
            arguments.name, folder, change_of(arguments), alias=arguments.alias, run_id=arguments.run_id, inputs=inputs
        )
    _print(arguments, version, f"{version.name} has this content already" if was_there else f"added {version.name}")
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """List the versions of all models, or of one, or those with a tag; with several --tag those that have all."""
    from noria.registry.tags import parse_tags

    tags = [tag for text in arguments.tag for tag in parse_tags(text)]
    with _store(arguments) as store:
        versions = store.all_versions(arguments.model, with_removed=arguments.removed, tags=tags)
    if arguments.json:
        for version in versions:
            print(as_json(version))
        return 0
    if not versions:
        print("no versions; add one: noria models add NAME SOURCE" if not tags else "no versions with these tags")
        return 0
    rows = [
        (
            version.name,
            ", ".join(version.aliases) if version.removed is None else "(removed)",
            ", ".join(version.tags),
            version.kind,
            format_size(version.size_bytes),
            version.digest[: len("sha256:") + 12],
            format_time(version.added.at),
            version.added.by,
            version.source,
        )
        for version in versions
    ]
    print(format_table(("version", "aliases", "tags", "kind", "size", "digest", "added", "by", "source"), rows))
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print a version: what it is, where its files are and their SHA-256, and what its aliases named when."""
    from noria.registry.manifest import parse

    with _store(arguments) as store:
        version = store.get(arguments.version)
        files, history = parse(store.manifest(version)), store.alias_history(version.model)
    if arguments.json:
        print(as_json({"version": version, "files": files, "alias_history": history}))
        return 0
    print(_describe(version))
    print("files")
    for path, digest in files.items():
        print(f"  {digest}  {escape_for_terminal(path)}")
    if history:
        print(f"aliases of {version.model}, the oldest change first")
    for event in history:
        named = "deleted" if event.number is None else f"→ {version.model}@{event.number}"
        why = f": {event.change.why}" if event.change.why else ""
        print(
            escape_for_terminal(f"  {format_time(event.change.at)}  {event.alias} {named}  by {event.change.by}{why}")
        )
    return 0


def run_card(arguments: argparse.Namespace) -> int:
    """Print the card of a version: Markdown below fields in YAML, as the hub and other catalogs of models read it.

    It has what the registry knows: the digest, where the version came from, the runs with their parameters and metrics,
    the data with its versions, and the endpoints that it serves.
    """
    from noria.registry.lineage.nodes import NodeId
    from noria.registry.lineage.trace import trace
    from noria.registry.model_card import model_card
    from noria.registry.versions import find_version

    with registry_of(arguments) as engine, engine.connect() as connection:
        version = find_version(connection, arguments.version)
        subject = [NodeId("model", version.digest)]
        above, below = (trace(connection, subject, direction) for direction in ("up", "down"))
        print(model_card(version, above, below))
    warn_if_cut(above, below)
    return 0


def run_alias(arguments: argparse.Namespace) -> int:
    """Let an alias name a version, instead of the one that it may name now; or delete it."""
    if arguments.delete:
        model = arguments.version.partition("@")[0]
        with _store(arguments) as store:
            store.delete_alias(model, arguments.alias, change_of(arguments))
        if arguments.json:
            print(as_json({"model": model, "alias": arguments.alias, "number": None}))
        else:
            print(f"{model} has no alias {arguments.alias} any more")
        return 0
    with _store(arguments) as store:
        version = store.set_alias(arguments.version, arguments.alias, change_of(arguments))
    _print(arguments, version, f"{arguments.alias} names {version.name}")
    return 0


def run_tag(arguments: argparse.Namespace) -> int:
    """Give a version tags, each instead of one with the same key; or delete them.

    MODEL@KEY=VALUE is then the latest version with a tag, wherever a version is named; noria deploy --follow deploys
    each that is it later.
    """
    from noria.registry.tags import parse_tags

    tags = {tag for text in arguments.tags for tag in parse_tags(text)}
    with _store(arguments) as store:
        version = store.tag(arguments.version, tags, change_of(arguments), delete=arguments.delete)
    _print(arguments, version, f"{version.name} has the tags {', '.join(version.tags) or '(none)'}")
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove a version that no alias and no deployment uses. Its history stays, and no file is deleted."""
    with _store(arguments) as store:
        version = store.remove(arguments.version, change_of(arguments))
    _print(arguments, version, f"removed {version.name}; its files are still in {', '.join(version.urls)}")
    return 0


@contextlib.contextmanager
def _store(arguments: argparse.Namespace, if_missing: Literal["empty", "create"] = "empty") -> "Iterator[ModelStore]":
    from noria.registry.model_store import ModelStore

    with registry_of(arguments, if_missing=if_missing) as engine:
        yield ModelStore(engine)


def _print(arguments: argparse.Namespace, version: "Version", sentence: str) -> None:
    if arguments.json:
        print(as_json(version))
    else:
        print(f"{escape_for_terminal(sentence)}\n{_describe(version)}")


def _describe(version: "Version") -> str:
    rows = {
        "version": version.name,
        "aliases": ", ".join(version.aliases) or "none",
        "tags": ", ".join(version.tags),
        "digest": version.digest,
        "content": f"{version.num_files} files, {format_size(version.size_bytes)}",
        "kind": version.kind,
        "fingerprint": version.fingerprint,
        "source": version.source,
        "revision": version.revision or "",
        "files in": ", ".join(version.urls),
        "added": f"{format_time(version.added.at)} by {version.added.by}",
        "why": version.added.why,
    }
    return "\n".join(f"  {name:{11}}  {escape_for_terminal(value)}" for name, value in rows.items() if value)
