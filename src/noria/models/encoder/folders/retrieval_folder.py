"""Describes encoders for retrieval whose results are sparse (SPLADE), or vectors of tokens (ColBERT). Knows no torch.

ColBERT's folders are those of its authors (HF_ColBERT), of PyLate and of sentence-transformers' MultiVectorEncoder.
"""

import pathlib
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from noria.errors import ModelError, short_repr
from noria.models.encoder.folders.config_files import (
    SENTENCE_TRANSFORMERS_FILE,
    TRANSFORMER_FILE,
    Count,
    Module,
    SentenceTransformers,
    Transformer,
    read_if_there,
)
from noria.models.encoder.folders.decoder_folder import ends_texts
from noria.models.encoder.folders.dense_folder import WEIGHT, read_dense
from noria.models.encoder.tokenizers.tokenizer_files import token_ids
from noria.models.files.weights import Shapes, convert, num_tensor_parameters, read_header, read_object, shell_command
from noria.protocol.text import (
    DenseActivation,
    DenseLayer,
    EncoderModelSpec,
    EncoderTask,
    LateInteraction,
    Splade,
    SpladeActivation,
    SpladeStrategy,
)

SPLADE_MODULE = "SpladePooling"
COLBERT_CLASS, METADATA_FILE = "HF_ColBERT", "artifact.metadata"


class _SpladePooling(Struct, frozen=True):
    """config.json of a SpladePooling; defaults are the library's."""

    pooling_strategy: str = "max"
    activation_function: str = "relu"


def describe_splade(
    folder: pathlib.Path,
    spec: EncoderModelSpec,
    modules: Sequence[Module],
    transformer: Transformer,
    library: SentenceTransformers,
) -> EncoderModelSpec:
    """Add what only sparse encoders have: a number for each token of the vocabulary.

    Raises ModelError: a file is damaged, or says something that is not supported.
    """
    if library.model_type not in ("SparseEncoder", "SentenceTransformer"):
        raise ModelError(
            f"{folder / SENTENCE_TRANSFORMERS_FILE}: model_type is {short_repr(library.model_type)}; of a model with a "
            "SpladePooling supported is SparseEncoder."
        )
    pooling = _SpladePooling()
    if modules:
        if len(modules) == 1:
            raise ModelError(
                f"{folder / 'modules.json'}: has no {SPLADE_MODULE}, but noria.json says that the pooling is 'splade'. "
                "Remove modules.json, or the pooling from noria.json."
            )
        if modules[0].name == "Transformer" and transformer.transformer_task != "fill-mask":
            raise ModelError(
                f"{folder / TRANSFORMER_FILE}: transformer_task is {short_repr(transformer.transformer_task)} of a "
                "model with a SpladePooling, which needs the head of fill-mask."
            )
        file = folder / modules[1].path / "config.json"
        pooling = convert(file, read_object(file), _SpladePooling)
        for key, allowed in (("pooling_strategy", SpladeStrategy), ("activation_function", SpladeActivation)):
            if (value := getattr(pooling, key)) not in get_args(allowed):
                raise ModelError(f"{file}: {key} is {short_repr(value)}; supported are {', '.join(get_args(allowed))}.")
    splade = {"strategy": pooling.pooling_strategy, "activation": pooling.activation_function}
    return msgspec.structs.replace(spec, dimensions=spec.vocab_size, splade=msgspec.convert(splade, Splade))


class _Expansion(Struct, frozen=True):
    """`query_expansion` of sentence_bert_config.json."""

    strategy: Literal["fixed", "min"]
    length: Count
    attend: bool = False
    token: str | None = None


class _Lengths(Struct, frozen=True):
    """sentence_bert_config.json, as MultiVectorEncoder writes it."""

    query_length: Count | None = None
    document_length: Count | None = None
    query_expansion: _Expansion | None = None


class _PyLate(Struct, frozen=True):
    """config_sentence_transformers.json, as PyLate writes it."""

    model_type: str = "SentenceTransformer"
    query_prefix: str | None = None
    document_prefix: str | None = None
    query_length: Count | None = None
    document_length: Count | None = None
    do_query_expansion: bool | None = None
    attend_to_expansion_tokens: bool | None = None
    skiplist_words: tuple[str, ...] | None = None


class _Mask(Struct, frozen=True):
    """config.json of a MultiVectorMask."""

    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)


class _Metadata(Struct, frozen=True):
    """artifact.metadata of ColBERT's authors; defaults are theirs."""

    query_token_id: str = "[unused0]"  # noqa: S105  # tokens of texts
    doc_token_id: str = "[unused1]"  # noqa: S105
    query_maxlen: Count = 32
    doc_maxlen: Count | None = None
    attend_to_mask_tokens: bool = False
    mask_punctuation: bool = True


class M3Head(NamedTuple):
    """A layer of tokens beside bge-m3's embeddings, in a file of its own."""

    task: EncoderTask
    stem: str
    activation: DenseActivation


M3_HEADS: Mapping[str | None, M3Head] = {
    "bge-m3-sparse": M3Head("sparse_embedding", "sparse_linear", "ReLU"),
    "bge-m3-colbert": M3Head("token_embedding", "colbert_linear", "Identity"),
}
"""By `pooling` of noria.json."""


def describe_m3(folder: pathlib.Path, spec: EncoderModelSpec, head: M3Head) -> EncoderModelSpec:
    """Add one of the two outputs that bge-m3 has beside its embeddings. Raises ModelError, as `describe_splade`."""
    file = folder / f"{head.stem}.safetensors"
    if not file.exists():
        pickle = folder / f"{head.stem}.pt"
        code = (
            "import torch, safetensors.torch as s; "
            f"s.save_file(torch.load({str(pickle)!r}, map_location='cpu', weights_only=True), {str(file)!r})"
        )
        raise ModelError(f"{file}: missing. Write it once, without running the pickle's code: {shell_command(code)}")
    shapes = read_header(file)
    num_outputs = 1 if head.task == "sparse_embedding" else shapes.get("weight", (0,))[0]
    if shapes != {"weight": (num_outputs, spec.dimensions), "bias": (num_outputs,)} or num_outputs == 0:
        raise ModelError(f"{file}: the layer has other tensors than a weight and a bias for {spec.dimensions} numbers.")
    layer = DenseLayer("", spec.dimensions, num_outputs, has_bias=True, activation=head.activation, stem=head.stem)
    if head.task == "sparse_embedding":
        special = _TokenIds(folder).special_ids()
        return msgspec.structs.replace(spec, dimensions=spec.vocab_size, dense=(layer,), unweighted_ids=special)
    late = LateInteraction(spec.max_length, spec.max_length, skips_first=True)
    return msgspec.structs.replace(spec, dimensions=num_outputs, dense=(layer,), normalize=True, late_interaction=late)


def describe_colbert(folder: pathlib.Path, spec: EncoderModelSpec, shapes: Shapes) -> EncoderModelSpec:
    """Add what a folder of ColBERT's authors has. Raises ModelError, as `describe_splade`."""
    shape = shapes.get(WEIGHT, ())
    if len(shape) != 2 or shape[1] != spec.dimensions:
        found = f"{WEIGHT} {list(shape)}" if shape else f"no {WEIGHT}"
        raise ModelError(
            f"{folder}: the weights have {found}; ColBERT's projection is [numbers of a vector, {spec.dimensions}]."
        )
    metadata = read_if_there(folder / METADATA_FILE, _Metadata)
    tokenizer = _TokenIds(folder)
    prompts = {"query": f"{metadata.query_token_id} ", "document": f"{metadata.doc_token_id} "}
    return msgspec.structs.replace(
        spec,
        dimensions=shape[0],
        dense=(DenseLayer("", shape[1], shape[0], has_bias=False, activation="Identity"),),
        normalize=True,
        prompts=tuple(prompts.items()),
        late_interaction=LateInteraction(
            query_length=min(metadata.query_maxlen, spec.max_length),
            document_length=min(metadata.doc_maxlen or spec.max_length, spec.max_length),
            fill_id=tokenizer.fill_id(None),
            fill_length=min(metadata.query_maxlen, spec.max_length),
            is_fill_seen=metadata.attend_to_mask_tokens,
            skipped_ids=tokenizer.all_ids(string.punctuation if metadata.mask_punctuation else ()),
            markers=tuple(filter(None, map(tokenizer.marker, prompts.values()))),
            ends_texts=tokenizer.ends_texts,
        ),
    )


def describe_late_interaction(
    folder: pathlib.Path, spec: EncoderModelSpec, modules: Sequence[Module], library: SentenceTransformers
) -> EncoderModelSpec:
    """Add what only encoders have that embed tokens. Raises ModelError, as `describe_splade`."""
    is_older = library.model_type == "ColBERT"  # PyLate's, whose mask and normalization are not in modules.json
    if not is_older and library.model_type != "MultiVectorEncoder":
        raise ModelError(
            f"{folder / SENTENCE_TRANSFORMERS_FILE}: model_type is {short_repr(library.model_type)}; of a model whose "
            "Dense follows the Transformer supported are ColBERT and MultiVectorEncoder."
        )
    pylate = read_if_there(folder / SENTENCE_TRANSFORMERS_FILE, _PyLate)
    lengths = read_if_there(folder / TRANSFORMER_FILE, _Lengths)
    tokenizer = _TokenIds(folder)
    skipped = _skipped_words(folder, modules, pylate, is_older=is_older)
    expansion = lengths.query_expansion
    if expansion is None and is_older and pylate.do_query_expansion is not False:
        expansion = _Expansion("fixed", pylate.query_length or 32, attend=bool(pylate.attend_to_expansion_tokens))
    longest = spec.max_length
    query_length = min(lengths.query_length or pylate.query_length or longest, longest)
    if expansion is not None and expansion.strategy == "fixed":
        query_length = expansion.length
    prompts = library.prompt_texts
    prefixes = {"query": pylate.query_prefix, "document": pylate.document_prefix}
    for name, prefix in prefixes.items():
        if prefix is not None:
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    dense, shapes = read_dense(folder, [each for each in modules[1:] if each.name == "Dense"], spec.dimensions)
    return msgspec.structs.replace(
        spec,
        num_parameters=spec.num_parameters + num_tensor_parameters(shapes),
        dimensions=dense[-1].out_features,
        dense=dense,
        normalize=is_older or modules[-1].name == "Normalize",
        prompts=tuple(prompts.items()),
        default_prompt=library.default_prompt_name,
        late_interaction=LateInteraction(
            query_length=min(query_length, longest),
            document_length=min(lengths.document_length or pylate.document_length or longest, longest),
            fill_id=None if expansion is None else tokenizer.fill_id(expansion.token),
            fill_length=0 if expansion is None else min(expansion.length, longest),
            is_fill_seen=expansion is not None and expansion.attend,
            skipped_ids=tokenizer.all_ids(skipped),
            markers=tuple(filter(None, map(tokenizer.marker, filter(None, prefixes.values())))),
            ends_texts=tokenizer.ends_texts,
        ),
    )


def _skipped_words(
    folder: pathlib.Path, modules: Sequence[Module], pylate: _PyLate, *, is_older: bool
) -> Sequence[str]:
    for module in modules:
        if module.name == "MultiVectorMask":
            file = folder / module.path / "config.json"
            mask = read_if_there(file, _Mask)
            if mask.skiplist_words and mask.skiplist_tasks != ("document",):
                raise ModelError(
                    f"{file}: skiplist_tasks is {short_repr(list(mask.skiplist_tasks))}; supported is document alone."
                )
            return mask.skiplist_words
    if not is_older:
        return ()
    return tuple(string.punctuation) if pylate.skiplist_words is None else pylate.skiplist_words


class _TokenIds:
    """The tokens of tokenizer.json by their text, added ones included."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._file = folder, folder / "tokenizer.json"
        self.ids = token_ids(folder)
        self.ends_texts = ends_texts(read_object(self._file).get("post_processor"))

    def special_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that begin, end and fill up texts, and of the unknown one."""
        tree = self._config()
        named = [tree.get(f"{name}_token") for name in ("cls", "eos", "pad", "unk")]
        return self.all_ids(str(each.get("content") if isinstance(each, dict) else each) for each in named)

    def _config(self) -> dict[str, Any]:
        file = self._folder / "tokenizer_config.json"
        return read_object(file) if file.exists() else {}

    def all_ids(self, words: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of those of the words that are tokens."""
        return tuple(sorted({self.ids[word] for word in words if word in self.ids}))

    def marker(self, prefix: str) -> str | None:
        """Return the token that a prefix begins with; None: it is ordinary text."""
        return next((each for each in (prefix, *prefix.split(None, 1)[:1]) if each in self.ids), None)

    def fill_id(self, token: str | None) -> int:
        """Return the id of the token that fills queries up, by default the tokenizer's for masks, else its last."""
        tree = self._config()
        named = [token] if token else [tree.get("mask_token"), tree.get("eos_token")]
        texts = [each.get("content") if isinstance(each, dict) else each for each in named]
        found = next((each for each in texts if each), None)
        if not isinstance(found, str) or found not in self.ids:
            raise ModelError(
                f"{self._file}: has no token {short_repr(found or 'mask_token')}, which fills queries up. Name it as "
                "`mask_token` in tokenizer_config.json."
            )
        return self.ids[found]
