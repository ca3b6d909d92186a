"""Checks and describes a folder of a text encoder: transformers' files, and sentence-transformers' if it has them.

What a folder computes is said by config.json (`architectures`) and, for embeddings, by modules.json and the
configurations that it names. This module knows neither torch nor transformers nor tokenizers; `checkpoint.py` loads the
weights, `hf_tokenizer.py` the tokenizer.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from noria.errors import ModelError, short_repr
from noria.models.encoder.architectures import CAUSAL, CLASS_PREFIXES, HEADS, POOLED_CLASSES, PRETRAINING_HEADS
from noria.models.encoder.folders.config_files import (
    SENTENCE_TRANSFORMERS_FILE,
    Config,
    Module,
    Overrides,
    SentenceTransformers,
    Tokenizer,
    Transformer,
    check_library_keys,
    embedding_settings,
    embeds_tokens,
    make_spec,
    read_config,
    read_if_there,
    read_modules,
    read_transformer,
)
from noria.models.encoder.folders.config_keys import POOLING_FLAGS, check_model_keys
from noria.models.encoder.folders.decoder_folder import check_decoder, check_end_token
from noria.models.encoder.folders.dense_folder import read_dense
from noria.models.encoder.folders.labels import activation_of, describe_labels, labels_of
from noria.models.encoder.folders.reranker_folder import describe_reranker, is_decoder_reranker
from noria.models.encoder.folders.retrieval_folder import (
    COLBERT_CLASS,
    M3_HEADS,
    SPLADE_MODULE,
    describe_colbert,
    describe_late_interaction,
    describe_m3,
    describe_splade,
)
from noria.models.encoder.folders.static_folder import MODEL_TYPE, describe_idf, describe_static, static_config
from noria.models.encoder.folders.task_folder import num_adapter_parameters, read_adapters
from noria.models.encoder.folders.tower_config import TOWERS
from noria.models.encoder.folders.tower_folder import inspect_tower
from noria.models.encoder.tokenizers.token_rows import ADAPTERS
from noria.models.encoder.tokenizers.tokenizer_files import check_tokenizer, check_word_embeddings, max_length
from noria.models.family import Family
from noria.models.files.weights import (
    REDOWNLOAD_HINT,
    Shapes,
    convert,
    num_tensor_parameters,
    read_object,
    read_weights,
    weight_files,
)
from noria.models.foreign_folders import describe_adapter
from noria.protocol.text import EncoderModelSpec, EncoderTask, Pooling, TaskAdapter


def inspect(folder: pathlib.Path, family: Family) -> EncoderModelSpec:
    """Check a folder and return its spec, without name and fingerprint.

    Raises ModelError: a file is damaged, or the folder computes something that is not supported.
    """
    file = folder / "config.json"
    _check_supported(folder)
    tree = read_config(folder)
    modules = read_modules(folder, tree.get("model_type"))
    overrides = read_if_there(folder / "noria.json", Overrides)
    if (special := _inspect_special(folder, family, tree, modules, overrides)) is not None:
        return special
    reranks = is_decoder_reranker(folder, tree, modules, overrides.reranker)
    is_colbert = not modules and tree.get("architectures") == [COLBERT_CLASS]
    is_sparse = overrides.pooling == "splade" or [each.name for each in modules[1:]] == [SPLADE_MODULE]
    check_decoder(file, tree, modules, reranks=reranks)
    config = convert(file, tree, Config)
    transformer = read_transformer(folder)
    prefix = CLASS_PREFIXES.get(config.model_type)
    if prefix is not None and (reranks or is_sparse):
        architecture: str = family.check_class(file, "", prefix + ("Model" if reranks else "ForMaskedLM"))
        task: EncoderTask = "reranking" if reranks else "sparse_embedding"
    elif prefix is not None and overrides.pooling in M3_HEADS:
        architecture, task = family.check_class(file, "", f"{prefix}Model"), M3_HEADS[overrides.pooling].task
    elif prefix is not None and (is_colbert or embeds_tokens(modules)):
        architecture, task = family.check_class(file, "", f"{prefix}Model"), "token_embedding"
    else:
        architecture, task = _architecture(file, config, modules, transformer, family)
    shapes = read_weights(folder, "", family.weight_stems[""])
    check_word_embeddings(weight_files(folder, "", family.weight_stems[""])[0], config, shapes)
    adapters, sentence_transformers = _read_tasks(folder, tree, config, shapes, task)
    tokenizer = read_if_there(folder / "tokenizer_config.json", Tokenizer)
    check_tokenizer(folder, config, transformer, tokenizer)
    spec = make_spec(
        folder,
        family,
        num_parameters=num_tensor_parameters(shapes) + num_adapter_parameters(folder, adapters),
        task=task,
        architecture=architecture,
        dimensions=config.hidden_size or config.dim or 0,
        max_length=max_length(folder, config, transformer, tokenizer),
        vocab_size=config.vocab_size,
        inputs=_inputs(config, adapters),
        adapters=adapters,
        truncation_side=tokenizer.truncation_side,
        unread_keys=tuple(
            check_model_keys(file, tree, config.model_type)
            + check_library_keys(folder, of_tokens=embeds_tokens(modules))
        ),
    )
    if overrides.pooling == "none":
        return _of_tokens(folder, spec, sentence_transformers)
    if task == "embedding":
        return _with_pooling(folder, spec, config, modules, sentence_transformers)
    if overrides.pooling in M3_HEADS:
        return describe_m3(folder, spec, M3_HEADS[overrides.pooling])
    if is_colbert:
        return describe_colbert(folder, spec, shapes)
    if task == "token_embedding":
        return describe_late_interaction(folder, spec, modules, sentence_transformers)
    if is_sparse:
        return describe_splade(folder, spec, modules, transformer, sentence_transformers)
    if reranks:
        spec = describe_reranker(folder, spec, config, modules, sentence_transformers, overrides.reranker, shapes)
        activation = activation_of(file, task, config, sentence_transformers)
        return msgspec.structs.replace(spec, activation=activation)
    return describe_labels(file, spec, config, sentence_transformers, shapes)


def _read_tasks(
    folder: pathlib.Path, tree: Mapping[str, Any], config: Config, shapes: Shapes, task: EncoderTask
) -> tuple[tuple[TaskAdapter, ...], SentenceTransformers]:
    """Return the adapters, and sentence-transformers' settings with the instructions of their tasks as prompts."""
    library = read_if_there(folder / SENTENCE_TRANSFORMERS_FILE, SentenceTransformers)
    adapters, instructions = read_adapters(folder, tree, shapes)
    if adapters and (task != "embedding" or config.type_vocab_size > 1):
        raise ModelError(
            f"{folder}: has adapters of tasks ({adapters[0].task}), which are for embeddings of texts without token "
            f"types; this one is for {task.replace('_', ' ')}, with type_vocab_size {config.type_vocab_size}."
        )
    if adapters or instructions:  # a prompt's name chooses the adapter, too
        prompts = dict.fromkeys([adapter.task for adapter in adapters], "") | (library.prompts or instructions)
        library = msgspec.structs.replace(library, prompts=prompts)
    return adapters, library


def _inputs(config: Config, adapters: tuple[TaskAdapter, ...]) -> tuple[str, ...]:
    """Return the names of the model's tensors."""
    others = {"token_type_ids": config.type_vocab_size > 1, ADAPTERS: bool(adapters)}
    return ("input_ids", "attention_mask", *(name for name, is_there in others.items() if is_there))


def _inspect_special(
    folder: pathlib.Path, family: Family, tree: Mapping[str, Any], modules: list[Module], overrides: Overrides
) -> EncoderModelSpec | None:
    """Return the spec of a text tower, a static embedding or a table of weights; None: it is none of these."""
    if overrides.pooling == "idf" and overrides.reranker is None:
        config, transformer = convert(folder / "config.json", dict(tree), Config), read_transformer(folder)
        tokenizer = read_if_there(folder / "tokenizer_config.json", Tokenizer)
        check_tokenizer(folder, config, transformer, tokenizer)
        return describe_idf(folder, family, config, max_length(folder, config, transformer, tokenizer))
    is_tower, names = str(tree.get("model_type")) in TOWERS, [module.name for module in modules]
    if not is_tower and tree.get("model_type") != MODEL_TYPE and "StaticEmbedding" not in names:
        return None
    if overrides.pooling is not None or overrides.reranker is not None:
        raise ModelError(
            f"{folder / 'noria.json'}: pooling and reranker are not for "
            f"{short_repr(tree.get('model_type'))}. Remove them."
        )
    return (inspect_tower if is_tower else _inspect_static)(folder, family, tree, modules)


def _inspect_static(
    folder: pathlib.Path, family: Family, tree: Mapping[str, Any], modules: list[Module]
) -> EncoderModelSpec:
    if tree.get("model_type") != MODEL_TYPE:
        raise ModelError(
            f"{folder / 'modules.json'}: the first module is StaticEmbedding, but config.json is of another model, "
            f"{short_repr(tree.get('model_type'))}."
        )
    shapes = read_weights(folder, "", family.weight_stems[""])
    config = static_config(folder, shapes)
    check_tokenizer(folder, config, Transformer(), Tokenizer(tokenizer_class="TokenizersBackend"))
    library = read_if_there(folder / SENTENCE_TRANSFORMERS_FILE, SentenceTransformers)
    return describe_static(folder, family, tree, config, modules, library, shapes)


def _check_supported(folder: pathlib.Path) -> None:
    """Check that the folder is neither an adapter nor quantized."""
    file = folder / "config.json"
    if (folder / "adapter_config.json").exists():
        raise ModelError(describe_adapter(folder))
    tree = read_object(file)
    for key in ("quantization_config", "compression_config"):
        if tree.get(key):
            raise ModelError(
                f"{file}: {key} is {short_repr(tree[key])}: quantized weights are not supported. Use the original "
                "model; engine.encoder_precision chooses a faster form of it."
            )


def _architecture(
    file: pathlib.Path, config: Config, modules: list[Module], transformer: Transformer, family: Family
) -> tuple[str, EncoderTask]:
    """Return the class that computes the model, and its task."""
    prefix = CLASS_PREFIXES.get(config.model_type)
    if prefix is None:
        raise ModelError(
            f"{file}: model_type is {short_repr(config.model_type)}; supported are {', '.join(CLASS_PREFIXES)}."
        )
    named = (config.architectures or (f"{prefix}Model",))[0]
    has_pooling = (
        len(modules) > 1 and modules[1].name != "Normalize"
    )  # then sentence-transformers loads the model without its head
    if named.removeprefix(prefix) in PRETRAINING_HEADS or (has_pooling and named in POOLED_CLASSES):
        named = f"{prefix}Model"
    architecture = family.check_class(file, "", named)
    task = HEADS[architecture.removeprefix(prefix)]
    if has_pooling and transformer.transformer_task != "feature-extraction":
        raise ModelError(
            f"{file.parent}: transformer_task is {short_repr(transformer.transformer_task)} of a model with a Pooling; "
            "supported is feature-extraction."
        )
    if transformer.transformer_task in ("text-generation", "fill-mask"):
        raise ModelError(
            f"{file.parent}: transformer_task is {short_repr(transformer.transformer_task)}, which needs the module "
            "LogitScore or SpladePooling in modules.json."
        )
    if modules and not has_pooling and (task != "classification" or len(modules) > 1):
        raise ModelError(
            f"{file.parent / 'modules.json'}: has no Pooling; supported without one are cross-encoders, whose class is "
            f"{prefix}ForSequenceClassification, not {named}."
        )
    return architecture, "reranking" if task == "classification" and len(labels_of(file, config)) == 1 else task


def _with_pooling(
    folder: pathlib.Path,
    spec: EncoderModelSpec,
    config: Config,
    modules: list[Module],
    sentence_transformers: SentenceTransformers,
) -> EncoderModelSpec:
    """Add what only embeddings have. A folder without modules.json has mean pooling, as in sentence-transformers."""
    settings = embedding_settings(folder / SENTENCE_TRANSFORMERS_FILE, sentence_transformers)
    pooling: tuple[Pooling, ...] = ("mean",)
    if modules:
        pooling = _read_pooling(
            folder / modules[1].path / "config.json", spec, has_prompts=any(dict(settings["prompts"]).values())
        )
    if config.model_type in CAUSAL and "lasttoken" in pooling:
        check_end_token(folder)
    width = spec.dimensions * len(pooling)
    dense, shapes = read_dense(folder, modules[2:], width)
    return msgspec.structs.replace(
        spec,
        num_parameters=spec.num_parameters + num_tensor_parameters(shapes),
        dimensions=dense[-1].out_features if dense else width,
        pooling=pooling,
        dense=dense,
        normalize=len(modules) > 2 and modules[-1].name == "Normalize",
        matryoshka_dimensions=config.matryoshka_dimensions,
        **settings,
    )


def _of_tokens(folder: pathlib.Path, spec: EncoderModelSpec, library: SentenceTransformers) -> EncoderModelSpec:
    """Return the spec of the states of a model's tokens, as they are before a pooling."""
    if spec.task != "embedding":
        raise ModelError(
            f"{folder / 'noria.json'}: the pooling is 'none', which is of models for embeddings; this one is for "
            f"{spec.task.replace('_', ' ')}. Remove it."
        )
    settings = embedding_settings(folder / SENTENCE_TRANSFORMERS_FILE, library)
    return msgspec.structs.replace(spec, task="token_embedding", **settings)


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
        named = tuple(mode for key, mode in POOLING_FLAGS.items() if tree.get(key)) or ("mean",)
    supported = ", ".join(get_args(Pooling))
    if not named:
        raise ModelError(f"{file}: the pooling is [], which is none; supported are {supported}.")
    for mode in named:
        if mode not in get_args(Pooling):
            raise ModelError(f"{file}: the pooling is {short_repr(mode)}; supported are {supported}.")
    return named
