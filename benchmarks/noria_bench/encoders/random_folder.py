"""Writes a folder in sentence-transformers' format: all-MiniLM-L6-v2 at its published size, with random weights.

python -m noria_bench.encoders.random_folder FOLDER [--tiny]

With it the bench of encoders measures a model of that size where no weights can be downloaded. Its tokenizer knows the
words of the bench's texts, each as one token, so that texts have the lengths that MiniLM's own tokenizer gives them.
"""

import argparse
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from noria.folders import cache_folder
from noria_bench.encoders.corpus import FIXED_TEXT, words

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CONFIG: dict[str, Any] = {
    "vocab_size": 30_522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
_MAX_TOKENS = 256
_TINY_CONFIG = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
# The library's 0.02 makes embeddings of nearly all texts alike, so that a wrong answer would pass for a right one.
_EMBEDDING_STD = 1.0


def main(write_folder: Callable[..., None], description: str | None) -> None:
    """Run the command of a module that writes a folder with random weights by `write_folder(FOLDER, tiny=…)`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true", help="with few numbers, to check that the command works")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already; choose another folder.")
    write_folder(arguments.folder, tiny=arguments.tiny)


def free_model(cache_dir: str) -> pathlib.Path:
    """Return the folder of a model that costs nothing: two layers of width 32. It is written into the cache once."""
    folder = cache_folder(cache_dir, os.environ) / "bench" / "free-encoder"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            write_random_folder(pathlib.Path(temporary, "free"), tiny=True)
            pathlib.Path(temporary, "free").rename(folder)
    return folder


def write_random_folder(folder: pathlib.Path, *, tiny: bool) -> None:
    """Write the folder."""
    from transformers import BertConfig, BertModel

    config = _CONFIG | (_TINY_CONFIG if tiny else {})
    torch.manual_seed(0)
    model = BertModel(BertConfig(**config), add_pooling_layer=False)
    torch.nn.init.normal_(model.embeddings.word_embeddings.weight, std=_EMBEDDING_STD)
    model.save_pretrained(folder)
    _write_tokenizer(folder, config["vocab_size"])
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (path, name) in enumerate(modules.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": _MAX_TOKENS, "do_lower_case": False},
        "tokenizer_config.json": {
            "tokenizer_class": "BertTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            **{f"{name[1:-1].lower()}_token": name for name in _SPECIAL},
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": config["hidden_size"],
            "pooling_mode_mean_tokens": True,
            "pooling_mode_cls_token": False,
        },
    }
    (folder / "2_Normalize").mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _write_tokenizer(folder: pathlib.Path, size: int) -> None:
    """Write BERT's tokenizer for uncased texts, with `size` tokens: words, characters, and unused ones."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = [*_SPECIAL, *characters, *(f"##{each}" for each in characters if each.isalnum())]
    found = normalizers.BertNormalizer().normalize_str(FIXED_TEXT).replace(",", "").replace(".", "").split()
    pieces = list(dict.fromkeys([*pieces, *words(), *found]))
    pieces += [f"[unused{number}]" for number in range(size - len(pieces))]
    tokenizer = Tokenizer(
        models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")  # noqa: S106
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main(write_random_folder, __doc__)
