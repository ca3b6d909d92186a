"""Describes what only models with labels have: their names, and what turns their logits into scores."""

import pathlib
from collections.abc import Mapping

import msgspec

from noria.errors import ModelError, short_repr
from noria.models.encoder.folders.config_files import SENTENCE_TRANSFORMERS_FILE, Config, SentenceTransformers
from noria.models.files.weights import REDOWNLOAD_HINT, Shapes
from noria.protocol.text import Activation, EncoderModelSpec, EncoderTask

_ACTIVATIONS: Mapping[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}


def describe_labels(
    file: pathlib.Path,
    spec: EncoderModelSpec,
    config: Config,
    sentence_transformers: SentenceTransformers,
    shapes: Shapes,
) -> EncoderModelSpec:
    """Add what only classifications have."""
    labels = labels_of(file, config)
    for name in ("classifier.weight", "classifier.out_proj.weight"):
        if name in shapes and shapes[name][0] != len(labels):
            key = "id2label" if config.id2label else "num_labels"
            raise ModelError(
                f"{file}: has {len(labels)} labels, but {name} has the shape {list(shapes[name])}. Set {key} for "
                f"{shapes[name][0]} labels."
            )
    prompt = sentence_transformers.prompts.get(sentence_transformers.default_prompt_name or "")
    if prompt:
        raise ModelError(
            f"{file.parent / SENTENCE_TRANSFORMERS_FILE}: default_prompt_name is "
            f"{short_repr(sentence_transformers.default_prompt_name)}; prompts of classifiers are not supported."
        )
    return msgspec.structs.replace(
        spec,
        dimensions=len(labels),
        labels=labels,
        problem_type=config.problem_type,
        activation=activation_of(file, spec.task, config, sentence_transformers),
    )


def labels_of(file: pathlib.Path, config: Config) -> tuple[str, ...]:
    """Return the labels in the order of the logits; those without a name are LABEL_0, LABEL_1 and so on.

    transformers does not write those of its default, two labels, and does not read a label2id that is alone.
    """
    key, found = "id2label", dict[str, object](config.id2label or {})
    if not found and config.label2id and config.num_labels in (None, len(config.label2id)):
        key, found = "label2id", {str(index): label for label, index in config.label2id.items()}
    if not found:
        return tuple(f"LABEL_{index}" for index in range(config.num_labels or 2))
    if found.keys() != {str(index) for index in range(len(getattr(config, key)))}:
        raise ModelError(
            f"{file}: {key} is {short_repr(getattr(config, key))}; labels are numbered from 0. {REDOWNLOAD_HINT}"
        )
    names = [found[str(index)] for index in range(len(found))]
    return tuple(f"LABEL_{index}" if name in (None, "") else str(name) for index, name in enumerate(names))


def activation_of(
    file: pathlib.Path,
    task: EncoderTask,
    config: Config,
    sentence_transformers: SentenceTransformers,
) -> Activation:
    """Return what turns logits into scores: sentence-transformers' choice for cross-encoders, else transformers'."""
    is_cross_encoder = config.sentence_transformers is not None or sentence_transformers.model_type == "CrossEncoder"
    named = (
        sentence_transformers.activation_fn
        or (config.sentence_transformers and config.sentence_transformers.activation_fn)
        or config.sbert_ce_default_activation_function
    )
    if named:
        for path, activation in _ACTIVATIONS.items():
            if named in (path, f"torch.nn.{path.rpartition('.')[2]}"):
                return activation
        raise ModelError(
            f"{file}: the activation function is {short_repr(named)}; supported are {', '.join(_ACTIVATIONS)}."
        )
    if config.problem_type == "regression" and not is_cross_encoder:
        return "identity"
    if task == "reranking" or (task == "classification" and config.problem_type == "multi_label_classification"):
        return "sigmoid"
    return "identity" if is_cross_encoder else "softmax"
