"""Writes the files of CLIP's tokenizer, which a checkpoint does not have and which is the same for all of them.

`clip_merges.txt.xz` has the merges of openai/CLIP's `bpe_simple_vocab_16e6.txt.gz` (MIT licence, beside it) that CLIP
uses. The vocabulary follows: 256 letters for bytes, the same at the end of a word, a word for each merge, and two
special tokens.
"""

import functools
import json
import lzma
import pathlib

_MERGES = pathlib.Path(__file__).parent / "clip_merges.txt.xz"
_START, _END = "<|startoftext|>", "<|endoftext|>"
_MAX_TOKENS = 77


def write_clip_tokenizer(folder: pathlib.Path, pad_token: str) -> None:
    """Write a tokenizer into a new folder; `pad_token` fills short prompts up."""
    folder.mkdir()
    merges = _read_merges()
    special = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": pad_token}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": _MAX_TOKENS, **special}
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(_vocabulary(merges), ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))


@functools.cache
def _read_merges() -> str:
    return lzma.decompress(_MERGES.read_bytes()).decode()


def _vocabulary(merges: str) -> dict[str, int]:
    """Return the id of each token, from merges.txt."""
    # Bytes that are visible letters of Latin-1 first; the others have the letters from 256 on.
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) not in "\xa0 "]
    letters = [*map(chr, visible), *(chr(256 + number) for number in range(256 - len(visible)))]
    words = ["".join(line.split()) for line in merges.splitlines()[1:]]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *words, _START, _END]
    return {token: number for number, token in enumerate(tokens)}
