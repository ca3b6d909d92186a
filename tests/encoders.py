"""Small text encoders with random weights, as folders: transformers writes them, and the tests compare with it."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from noria.config import EngineConfig
from noria.engine.encoder.sessions import load_sessions
from noria.folders import cache_folder
from noria.models.catalog import open_model_of
from noria.models.encoder.onnx_export import export
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import Session, TokenRow, image_part
from noria.protocol.text import EncoderModelSpec

CONFIG = EngineConfig(encoder_sessions=1, threads=1)
TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"

TEXTS = [
    "a red circle",
    "",
    "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the evening.",
    "Größe, naïve café — 東京 ✓",
    "one",
    "words " * 40,
]
"""Of 2 to 40 tokens or more, one of them empty."""

PAIRS = [("what is red?", "a red circle"), ("", "b"), ("long " * 30, "short"), ("short", "long " * 50)]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "Bert": SMALL | {"max_position_embeddings": 64},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    "Deberta": SMALL | {"max_position_embeddings": 64},
    "EuroBert": SMALL | {"max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2,
                         "eos_token_id": 3, "mask_token_id": 4},
    # The window is of one layer's tokens on both sides, so that padding and position matter there.
    "Gemma3Text": SMALL | {"max_position_embeddings": 64, "num_key_value_heads": 1, "head_dim": 8,
                            "query_pre_attn_scalar": 8, "use_bidirectional_attention": True, "sliding_window": 8,
                            "layer_types": ["sliding_attention", "full_attention"]},
    "JinaEmbeddingsV3": SMALL | {"max_position_embeddings": 66, "pad_token_id": 1},
    "Mistral": SMALL | {"max_position_embeddings": 64, "num_key_value_heads": 2, "sliding_window": 8},
    "Qwen2": SMALL | {"max_position_embeddings": 64, "num_key_value_heads": 2},
    "Qwen3": SMALL | {"max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 16},
    "NomicBert": SMALL | {"max_position_embeddings": 64},
    "Roberta": SMALL | {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1},
    # Local attention in one of two layers, so that padding matters there, too.
    "ModernBert": SMALL | {"max_position_embeddings": 64, "local_attention": 8, "global_attn_every_n_layers": 2,
                            "pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 2},
}  # fmt: skip


def make_encoder(
    folder: pathlib.Path, architecture: str = "BertModel", config: dict[str, Any] | None = None, **files: Any
) -> pathlib.Path:
    """Write a small model with seeded random weights and a tokenizer.

    `config` adds to config.json; `files` are other JSON files, by their names with "__" for "/" and without ".json".
    """
    import torch
    import transformers

    prefix = next(name for name in sorted(SETTINGS, key=len, reverse=True) if architecture.startswith(name))
    size = make_tokenizer(folder, is_roberta=prefix in ("Roberta", "ModernBert", "JinaEmbeddingsV3"))
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    settings = SETTINGS[prefix] | {"vocab_size": size} | (config or {})
    model = model_class(model_class.config_class(**settings))
    for parameter in model.parameters():  # the library's are so small that texts would hardly differ
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    for name, content in files.items():
        write_json(folder / f"{name.replace('__', '/')}.json", content)
    return folder


def make_tower(folder: pathlib.Path, architecture: str, **text: Any) -> None:
    """Write a small model of texts and images, or its text tower, whose texts have up to 24 tokens.

    `text` adds to the configuration of the tower.
    """
    import torch
    import transformers

    size = make_tokenizer(folder)
    own = {"eos_token_id": 3} if architecture.startswith("CLIP") else {"projection_size": 40}
    text = SMALL | {"vocab_size": size, "max_position_embeddings": 24, "bos_token_id": 2} | own | text
    model_class = getattr(transformers, architecture)
    if "Text" in architecture:
        config = model_class.config_class(**text, projection_dim=16)
    else:
        images = {"num_patches": 16} if architecture == "Siglip2Model" else {"image_size": 32}
        config = model_class.config_class(text_config=text, vision_config=SMALL | images | {"patch_size": 16})
        config.projection_dim = 16  # which SigLIP does not compute with
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    settings = {"pad_token": "[PAD]", "model_max_length": 24, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(folder / "tokenizer_config.json", settings | {"model_input_names": ["input_ids"]})


def open_encoder(folder: pathlib.Path | str) -> EncoderModelSpec:
    """Open a text encoder."""
    return open_model_of(EncoderModelSpec, str(folder), EngineConfig())


def open_exported(model: str, cache: str = "") -> EncoderModelSpec:
    """Open a model and export it in this process: one of its own, as the product starts, would import torch again."""
    spec = open_encoder(model)
    for tower in (spec,) if spec.image_input is None else (spec, image_part(spec)):
        export(tower, cache_folder(cache, os.environ))
    return spec


def rows_of(spec: EncoderModelSpec, inputs: Sequence[Any]) -> list[TokenRow]:
    """Return texts or pairs as the model sees them."""
    return [TokenRow.of(text) for text in HuggingFaceTokenizer(spec).encode(inputs)]


def open_session(spec: EncoderModelSpec, path: str, cache: pathlib.Path) -> Session:
    """Return the session of a model: "torch", "packed", which is torch, too, or the "graph", exported into `cache`."""
    if path == "graph":
        open_exported(spec.folder, str(cache))
    backend = {"encoder_backend": "auto" if path == "graph" else "torch", "cache_dir": str(cache)}
    packing = {"encoder_packing": "on"} if path == "packed" else {}
    (session,) = load_sessions(spec, msgspec.structs.replace(CONFIG, **backend | packing), "cpu")
    return session


def assert_results(session: Session, rows: Sequence[Any], expected: Sequence[Any], *, normalize: bool = False) -> None:
    """Compare the results of rows in one batch, in two, and each alone; `normalize` makes them as long as 1."""
    for batches in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
        results = [result for batch in batches for result in session.run(batch)]
        for got, right in zip(results, expected, strict=True):
            assert got.shape == right.shape
            scale = np.linalg.norm(got) if normalize else 1.0
            np.testing.assert_allclose(got / scale, right, atol=1e-5 * max(1.0, np.abs(right).max()))


def make_tokenizer(folder: pathlib.Path, *, is_roberta: bool = False) -> int:
    """Write tokenizer.json: WordPiece in lower case, or byte-level BPE as RoBERTa's. Returns its vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True, exist_ok=True)
    corpus = pathlib.Path(__file__).with_name("encoders.py").read_text(encoding="utf-8").splitlines()
    if is_roberta:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(corpus, trainer)
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
        )
        tokenizer.train_from_iterator(corpus, trainer)
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    size: int = tokenizer.get_vocab_size()
    return size


def sentence_transformer(width: int = 32, *, normalize: bool = True, **pooling: Any) -> dict[str, Any]:
    """The files of sentence-transformers, for `make_encoder`: mean pooling unless `pooling` says otherwise."""
    modules = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    paths = ["", "1_Pooling", "2_Normalize"]
    return {
        "modules": [
            {"idx": index, "name": str(index), "path": paths[index], "type": f"sentence_transformers.models.{name}"}
            for index, name in enumerate(modules)
        ],
        "1_Pooling__config": {"word_embedding_dimension": width} | (pooling or {"pooling_mode_mean_tokens": True}),
    }


def add_dense(folder: pathlib.Path, *layers: tuple[int, int, str, bool]) -> None:
    """Put modules Dense after the pooling of a folder, as sentence-transformers writes them.

    A layer is its numbers of inputs and outputs, its activation function, and whether it has a bias.
    """
    import torch
    from safetensors.torch import save_file

    modules = json.loads((folder / "modules.json").read_text())
    added = [
        {"path": f"{number}_Dense", "type": "sentence_transformers.models.Dense"}
        for number in range(2, 2 + len(layers))
    ]
    write_json(
        folder / "modules.json",
        [each | {"idx": index, "name": str(index)} for index, each in enumerate([*modules[:2], *added, *modules[2:]])],
    )
    torch.manual_seed(1)
    for each, (num_inputs, num_outputs, activation, has_bias) in zip(added, layers, strict=True):
        keys = ("in_features", "out_features", "bias", "activation_function")
        values = (num_inputs, num_outputs, has_bias, activation)
        write_json(folder / each["path"] / "config.json", dict(zip(keys, values, strict=True)))
        tensors = {"linear.weight": torch.randn(num_outputs, num_inputs) / 4}
        save_file(
            tensors | ({"linear.bias": torch.randn(num_outputs)} if has_bias else {}),
            folder / each["path"] / "model.safetensors",
        )


def write_json(file: pathlib.Path, content: Any) -> None:
    """Write a JSON file, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def change_json(file: pathlib.Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    tree = json.loads(file.read_text()) | changes
    write_json(file, {key: value for key, value in tree.items() if value is not None})


def transformers_alone(folder: pathlib.Path, architecture: str, rows: Sequence[Any]) -> list[Any]:
    """Compute rows by transformers, each alone and without padding: logits, or the tokens' embeddings."""
    import torch
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    results = []
    with torch.no_grad():
        for row in rows:
            inputs = {"input_ids": torch.tensor([row.ids.tolist()])}
            if row.type_ids is not None:
                inputs["token_type_ids"] = torch.tensor([row.type_ids.tolist()])
            results.append(model(**inputs)[0][0].numpy())
    return results
