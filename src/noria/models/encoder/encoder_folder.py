"""Checks and describes a folder of a text encoder: transformers' files, and sentence-transformers' if it has them.

What a folder computes is said by config.json (`architectures`) and, for embeddings, by modules.json and the
configurations that it names. This module knows neither torch nor transformers nor tokenizers; `checkpoint.py` loads the
weights, `hf_tokenizer.py` the tokenizer.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from noria.errors import ModelError, short_repr
from noria.models.encoder.architectures import CLASS_PREFIXES, HEADS, PRETRAINING_HEADS
from noria.models.encoder.config_files import (
    Config,
    Module,
    Overrides,
    SentenceTransformers,
    Tokenizer,
    Transformer,
    read_if_there,
    read_modules,
    read_transformer,
)
from noria.models.family import Family
from noria.models.weights import (
    REDOWNLOAD_HINT,
    Shapes,
    num_tensor_parameters,
    read_object,
    read_struct,
    read_weights,
    weight_files,
)
from noria.protocol.text import Activation, EncoderModelSpec, EncoderTask, Pooling

_POOLING_FLAGS: Mapping[str, Pooling] = {  # in the order in which sentence-transformers concatenates
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def inspect(folder: pathlib.Path, family: Family) -> EncoderModelSpec:
    """Check a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or the folder computes something that is not supported.

    """
    file = folder / "config.json"
    _check_supported(folder)
    config, modules = read_struct(file, Config), read_modules(folder)
    architecture, task = _architecture(file, config, modules, family)
    shapes = read_weights(folder, "", family.weight_stems[""])
    _check_word_embeddings(weight_files(folder, "", family.weight_stems[""])[0], config, shapes)
    if (folder / "noria.json").exists():
        read_struct(folder / "noria.json", Overrides)
    transformer = read_transformer(folder)
    sentence_transformers = read_if_there(folder / "config_sentence_transformers.json", SentenceTransformers)
    _check_tokenizer(folder, config, transformer)
    spec = EncoderModelSpec(
        name="",  # the catalog sets name and fingerprint
        folder=str(folder),
        fingerprint="",
        family=family.name,
        num_parameters=num_tensor_parameters(shapes),
        task=task,
        architecture=architecture,
        dimensions=config.hidden_size or config.dim or 0,
        max_length=_max_length(folder, config, transformer),
        vocab_size=config.vocab_size,
        inputs=("input_ids", "attention_mask") + (("token_type_ids",) if config.type_vocab_size > 1 else ()),
    )
    if task == "embedding":
        return _with_pooling(folder, spec, config, modules, sentence_transformers)
    return _with_labels(file, spec, config, sentence_transformers)


def _check_supported(folder: pathlib.Path) -> None:
    """Check that the folder is neither an adapter nor quantized nor a decoder."""
    file, adapter_file = folder / "config.json", folder / "adapter_config.json"
    if adapter_file.exists():
        raise ModelError(f"{adapter_file}: adapters are not supported. Merge it into the model, and remove the file.")
    tree = read_object(file)
    for key in ("quantization_config", "compression_config"):
        if tree.get(key):
            raise ModelError(
                f"{file}: {key} is {short_repr(tree[key])}: quantized weights are not supported. Use the original "
                "model; engine.encoder_precision chooses a faster form of it."
            )
    if tree.get("is_decoder"):
        raise ModelError(f"{file}: is_decoder is true: each token sees only those before it; supported are encoders.")


def _architecture(file: pathlib.Path, config: Config, modules: list[Module], family: Family) -> tuple[str, EncoderTask]:
    """Return the class that computes the model, and its task."""
    prefix = CLASS_PREFIXES.get(config.model_type)
    if prefix is None:
        raise ModelError(
            f"{file}: model_type is {short_repr(config.model_type)}; supported are {', '.join(CLASS_PREFIXES)}."
        )
    named = (config.architectures or (f"{prefix}Model",))[0]
    has_pooling = len(modules) > 1  # then sentence-transformers loads the model without its head
    if has_pooling or named.removeprefix(prefix) in PRETRAINING_HEADS:
        named = f"{prefix}Model"
    architecture = family.check_class(file, "", named)
    task = HEADS[architecture.removeprefix(prefix)]
    if modules and not has_pooling and task != "classification":
        raise ModelError(
            f"{file.parent / 'modules.json'}: has no Pooling; supported without one are cross-encoders, whose class is "
            f"{prefix}ForSequenceClassification, not {named}."
        )
    return architecture, "reranking" if task == "classification" and len(_labels(file, config)) == 1 else task


def _check_word_embeddings(file: pathlib.Path, config: Config, shapes: Shapes) -> None:
    """Check the first tensor: weights of another model would fail only when loaded, with a stack trace."""
    found = [shape for name, shape in shapes.items() if re.search(r"(word_embeddings|tok_embeddings)\.weight$", name)]
    if found and found[0][0] != config.vocab_size:
        raise ModelError(
            f"{file}: the word embeddings have {found[0][0]} rows, but config.json has vocab_size {config.vocab_size}: "
            f"weights and configuration belong to two models. {REDOWNLOAD_HINT}"
        )


def _check_tokenizer(folder: pathlib.Path, config: Config, transformer: Transformer) -> None:
    """Check that there is a tokenizer.json whose token ids the model has, and that lower case is its own matter."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(
            f'{file}: missing. Write it once: python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    tree = read_object(file)
    model = tree.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise ModelError(f"{file}: contains no vocabulary. {REDOWNLOAD_HINT}")
    try:  # a Unigram model has a list of tokens, of which the position is the id
        ids = (
            msgspec.convert(list(vocabulary.values()), list[int])
            if isinstance(vocabulary, dict)
            else [len(vocabulary) - 1]
        )
        ids += [token["id"] for token in msgspec.convert(tree.get("added_tokens") or [], list[dict[str, Any]])]
        max_id = max(ids, default=-1)
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: contains no vocabulary from words to token ids. {REDOWNLOAD_HINT}") from error
    if max_id >= config.vocab_size:
        raise ModelError(
            f"{file}: has token ids up to {max_id}, but the model has {config.vocab_size} tokens. {REDOWNLOAD_HINT}"
        )
    if transformer.do_lower_case and not _lowercases(tree.get("normalizer")):
        raise ModelError(
            f"{folder / 'sentence_bert_config.json'}: do_lower_case is true, but tokenizer.json has no normalizer that "
            "makes lower case. Add one to it."
        )


def _lowercases(normalizer: object) -> bool:
    """Whether a normalizer of tokenizer.json makes lower case."""
    if not isinstance(normalizer, dict):
        return False
    parts = normalizer.get("normalizers")
    return (
        normalizer.get("type") == "Lowercase"
        or bool(normalizer.get("lowercase"))
        or (isinstance(parts, list) and any(map(_lowercases, parts)))
    )


def _max_length(folder: pathlib.Path, config: Config, transformer: Transformer) -> int:
    """Return the maximum length of a text in tokens: sentence-transformers', else the tokenizer's, else the model's."""
    tokenizer = read_if_there(folder / "tokenizer_config.json", Tokenizer)
    lengths = [transformer.max_seq_length or tokenizer.model_max_length or config.num_positions, config.num_positions]
    shortest = int(min(lengths))
    if shortest < 3:  # two special tokens and one of a text
        raise ModelError(f"{folder / 'config.json'}: texts could have {shortest} tokens; at least 3 are needed.")
    return shortest


def _with_pooling(
    folder: pathlib.Path,
    spec: EncoderModelSpec,
    config: Config,
    modules: list[Module],
    sentence_transformers: SentenceTransformers,
) -> EncoderModelSpec:
    """Add what only embeddings have. A folder without modules.json has mean pooling, as in sentence-transformers."""
    if sentence_transformers.model_type != "SentenceTransformer":
        raise ModelError(
            f"{folder / 'config_sentence_transformers.json'}: model_type is "
            f"{short_repr(sentence_transformers.model_type)}; supported are SentenceTransformer and CrossEncoder."
        )
    prompts = tuple((name, text or "") for name, text in sentence_transformers.prompts.items())
    default = sentence_transformers.default_prompt_name
    if default is not None and default not in dict(prompts):
        raise ModelError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name is {short_repr(default)}, which is "
            f"not among the prompts {', '.join(dict(prompts)) or '(there are none)'}."
        )
    pooling: tuple[Pooling, ...] = ("mean",)
    if modules:
        pooling = _read_pooling(folder / modules[1].path / "config.json", spec, has_prompts=any(dict(prompts).values()))
    return msgspec.structs.replace(
        spec,
        dimensions=spec.dimensions * len(pooling),
        pooling=pooling,
        normalize=len(modules) == 3,
        prompts=prompts,
        default_prompt=default,
        matryoshka_dimensions=config.matryoshka_dimensions,
    )


def _read_pooling(file: pathlib.Path, spec: EncoderModelSpec, *, has_prompts: bool) -> tuple[Pooling, ...]:
    tree = read_object(file)
    width = tree.get("embedding_dimension", tree.get("word_embedding_dimension"))
    if width != spec.dimensions:
        raise ModelError(
            f"{file}: pools tokens of {short_repr(width)} numbers, but the model's have {spec.dimensions}: the parts "
            f"belong to two models. {REDOWNLOAD_HINT}"
        )
    if tree.get("include_prompt") is False and has_prompts:
        raise ModelError(
            f"{file}: include_prompt is false: the tokens of prompts would have to be left out of the pooling, which "
            "is not supported."
        )
    if "pooling_mode" in tree:
        mode = tree["pooling_mode"]
        named = tuple(mode) if isinstance(mode, list) else (mode,)
    else:
        named = tuple(key for key, value in tree.items() if key.startswith("pooling_mode_") and value)
        named = tuple(sorted((_POOLING_FLAGS.get(key, key) for key in named), key=_pooling_rank)) or ("mean",)
    for mode in named:
        if mode not in get_args(Pooling):
            raise ModelError(
                f"{file}: the pooling is {short_repr(mode)}; supported are {', '.join(get_args(Pooling))}."
            )
    return named


def _pooling_rank(mode: str) -> int:
    """The place in which sentence-transformers concatenates a pooling."""
    modes = list(_POOLING_FLAGS.values())
    return modes.index(mode) if mode in modes else len(modes)


def _with_labels(
    file: pathlib.Path, spec: EncoderModelSpec, config: Config, sentence_transformers: SentenceTransformers
) -> EncoderModelSpec:
    """Add what only classifications have."""
    labels = _labels(file, config)
    return msgspec.structs.replace(
        spec,
        dimensions=len(labels),
        labels=labels,
        problem_type=config.problem_type,
        activation=_activation(file, spec.task, config, sentence_transformers),
    )


def _labels(file: pathlib.Path, config: Config) -> tuple[str, ...]:
    """Return the labels in the order of the logits; transformers does not write those of its default, two labels."""
    by_id = {"0": "LABEL_0", "1": "LABEL_1"} if config.id2label is None else config.id2label
    if not by_id or by_id.keys() != {str(index) for index in range(len(by_id))}:
        raise ModelError(f"{file}: id2label is {short_repr(by_id)}; labels are numbered from 0. {REDOWNLOAD_HINT}")
    return tuple(by_id[str(index)] for index in range(len(by_id)))


def _activation(
    file: pathlib.Path,
    task: EncoderTask,
    config: Config,
    sentence_transformers: SentenceTransformers,
) -> Activation:
    """Return what turns logits into scores: sentence-transformers' choice for cross-encoders, else transformers'."""
    is_cross_encoder = config.sentence_transformers is not None or sentence_transformers.model_type == "CrossEncoder"
    named = (
        (config.sentence_transformers and config.sentence_transformers.activation_fn)
        or config.sbert_ce_default_activation_function
        or sentence_transformers.activation_fn
    )
    if named:
        name = named.rpartition(".")[2]
        if not named.startswith("torch.") or name not in _ACTIVATIONS:
            raise ModelError(
                f"{file}: the activation function is {short_repr(named)}; supported are torch.nn.modules."
                f"{{linear.Identity, activation.Sigmoid, activation.Softmax}}."
            )
        return _ACTIVATIONS[name]
    if task == "reranking" or (task == "classification" and config.problem_type == "multi_label_classification"):
        return "sigmoid"
    return "identity" if is_cross_encoder or config.problem_type == "regression" else "softmax"
