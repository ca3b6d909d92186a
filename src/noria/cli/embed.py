"""`noria embed`: computes embeddings of texts in this process, without a server."""

import argparse
import pathlib
import sys
from typing import Any

from noria.cli.parser import Parser, add_command, add_settings, config_from
from noria.errors import ConfigError, InvalidField, short_repr

_SUFFIXES = (".jsonl", ".npy")


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    usage = "TEXT [TEXT ...] [--model MODEL] [-o FILE]"
    parser = add_command(commands, "embed", run, usage, "compute embeddings of texts here, without a server")
    add = parser.add_argument
    add("texts", nargs="+", metavar="TEXT", help="a text; - reads texts from standard input, a line each")
    add("--model", dest="encoder", default="minilm", help="a folder in transformers format, a hub id, or minilm")
    add(
        "-o",
        "--output",
        type=pathlib.Path,
        help="file to write: .jsonl, or .npy for one float32 array (standard output)",
    )
    add_settings(parser, "engine")
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Compute embeddings of texts in this process. Prints a line of JSON for each, or writes a file."""
    output: pathlib.Path | None = arguments.output
    if output is not None and output.suffix.lower() not in _SUFFIXES:
        raise InvalidField(f"--output is {short_repr(str(output))}; its suffix must be one of {', '.join(_SUFFIXES)}.")
    config = config_from(arguments)

    import msgspec

    from noria.models.catalog import open_model_of
    from noria.observe.logs.setup import logging_here
    from noria.protocol.text import EncoderModelSpec

    spec = open_model_of(EncoderModelSpec, arguments.encoder, config.engine)
    if spec.task != "embedding":
        raise InvalidField(
            f"--model is {spec.name}, whose task is {spec.task}; embeddings need one of sentence-transformers."
        )
    texts = [line for text in arguments.texts for line in (sys.stdin.read().splitlines() if text == "-" else [text])]
    if not texts:
        raise InvalidField("standard input has no text.")
    if empty := [index for index, text in enumerate(texts) if not text.strip()]:
        raise InvalidField(f"text {empty[0]} (counted from 0) is empty.")
    import numpy as np

    with logging_here("embed", config.log_level, config.log_format):
        embeddings, lengths, num_cut = _compute(spec, config.engine, texts)
    if output is not None and output.suffix.lower() == ".npy":
        _write(output, lambda file: np.save(file, embeddings))
        return 0
    lines = [
        msgspec.json.encode({"text": text, "tokens": length, "cut": cut, "embedding": embedding.tolist()})
        for text, length, cut, embedding in zip(texts, lengths, num_cut, embeddings, strict=True)
    ]
    if output is None:
        print(b"\n".join(lines).decode())
    else:
        _write(output, lambda file: file.write(b"\n".join(lines) + b"\n"))
    return 0


def _compute(spec: Any, config: Any, texts: list[str]) -> tuple[Any, list[int], list[int]]:
    """Return the embeddings [texts, dimensions], and of each text its tokens and how many more were cut off."""
    import msgspec
    import numpy as np

    from noria.engine.encoder.sessions import load_sessions
    from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
    from noria.models.encoder.tokenizers.token_rows import TokenRow, compute

    prompt = dict(spec.prompts).get(spec.default_prompt, "")
    rows = HuggingFaceTokenizer(spec).encode([prompt + text for text in texts])
    one_session = msgspec.structs.replace(config, encoder_sessions=1)  # all cores for each batch
    (session,) = load_sessions(spec, one_session, config.devices[0])
    embeddings = np.stack(compute(session, [TokenRow.of(row) for row in rows]))
    if spec.normalize:
        embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings, [row.num_tokens for row in rows], [row.num_cut for row in rows]


def _write(output: pathlib.Path, write: Any) -> None:
    try:
        with output.open("wb") as file:
            write(file)
    except OSError as error:
        raise ConfigError(f"output {str(output)!r} cannot be written: {error.strerror}.") from error
    print(output)
