"""Reads the configuration files of a text encoder's folder: transformers', and sentence-transformers' if it has them.

Each is checked by itself. `encoder_folder.py` checks that they, the weights and the tokenizer fit together.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError, short_list, short_repr
from noria.models.encoder.architectures import OFFSET_POSITIONS
from noria.models.encoder.folders.config_keys import check_file_keys, check_module_keys
from noria.models.encoder.folders.tower_config import text_tower
from noria.models.family import Family
from noria.models.files.weights import REDOWNLOAD_HINT, convert, read_object, read_text
from noria.protocol.text import EncoderModelSpec, ProblemType, Similarity, TruncationSide

_TRANSFORMER_TASKS = ("feature-extraction", "sequence-classification", "text-generation", "fill-mask")
TRANSFORMER_FILE = "sentence_bert_config.json"
SENTENCE_TRANSFORMERS_FILE = "config_sentence_transformers.json"

_MODULES = (
    "Transformer", "Pooling", "Dense", "Normalize", "LogitScore", "MLMTransformer", "SpladePooling", "MultiVectorMask",
    "StaticEmbedding",
)  # fmt: skip
_PACKAGES = "base|sentence_transformer|cross_encoder|sparse_encoder|multi_vector_encoder"
_MODULE_TYPE = re.compile(
    rf"sentence_transformers\.(?:(?:{_PACKAGES})\.modules|(?:(?:base|sparse_encoder)\.)?models)(?:\.\w+)?\.({'|'.join(_MODULES)})",
    re.ASCII,
)
"""The library's classes, which moved between its versions; group 1 is the class."""

_CHAIN = re.compile(
    r"Transformer(,LogitScore|,Normalize|,Pooling(,Dense|,Normalize)*)?|(MLM)?Transformer,SpladePooling"
    r"|Transformer(,Dense)+(,MultiVectorMask)?(,Normalize)?|StaticEmbedding(,Normalize)?",
    re.ASCII,
)

_NOMIC_NAMES: Mapping[str, str] = {
    "layer_norm_epsilon": "layer_norm_eps",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}
_NOMIC_VALUES: Mapping[str, tuple[object, ...]] = {
    "activation_function": ("swiglu",),
    "causal": (False, None),
    "max_trained_positions": (2048, None),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "parallel_block": (False, None),
    "parallel_block_tied_norm": (False, None),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "reorder_and_upcast_attn": (False, None),
    "rotary_emb_fraction": (1,),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "scale_attn_weights": (True,),
}
"""The older form of NomicBERT's config.json: its names of sizes, and the values that are what transformers computes."""

_EXPERT_VALUES: Mapping[str, tuple[object, ...]] = {
    **_NOMIC_VALUES,
    "activation_function": ("gelu",),
    "expert_choice_router": (False, None),
    "ffn_div": (1, None),
    "mlp_fc1_bias": (True,),
    "mlp_fc2_bias": (True,),
    "moe_normalize_expert_weights": (False, None),
    "num_shared_experts": (0, None),
    "qkv_proj_bias": (True,),
}
"""Likewise of a mixture of experts, which `experts.py` computes."""

_OWN_TRANSFORMERS: Mapping[object, str] = {"jina_embeddings_v3": "custom_st.Transformer"}
"""The modules that choose the adapter of a task, in code of the folder, by the `model_type`."""

T = TypeVar("T")
Count = Annotated[int, Meta(ge=1)]


class CrossEncoder(Struct, frozen=True):
    """`sentence_transformers` in config.json."""

    activation_fn: str | None = None


class Config(Struct, frozen=True):
    """config.json: what is checked of it; defaults are transformers'."""

    model_type: str
    vocab_size: Count
    architectures: tuple[str, ...] | None = None
    hidden_size: Count | None = None
    dim: Count | None = None  # DistilBERT's hidden size
    max_position_embeddings: Count = 512
    type_vocab_size: int = 0
    pad_token_id: int | None = None
    is_decoder: bool = False
    id2label: dict[str, str | int | float | None] | None = None
    label2id: dict[str, int | str] | None = None  # counts only without `id2label`
    num_labels: Count | None = None  # counts only without both
    problem_type: ProblemType | None = None
    sentence_transformers: CrossEncoder | None = None
    sbert_ce_default_activation_function: str | None = None
    matryoshka_dimensions: tuple[Count, ...] | None = None

    @property
    def num_positions(self) -> int:
        """The number of tokens that the model has positions for."""
        padding = 1 if self.pad_token_id is None else self.pad_token_id
        return self.max_position_embeddings - (padding + 1 if self.model_type in OFFSET_POSITIONS else 0)


class _Experts(Struct, frozen=True):
    """The keys of config.json that a mixture of experts must have."""

    num_experts: Annotated[int, Meta(ge=2)]
    moe_top_k: Count
    moe_every_n_layers: Annotated[int, Meta(ge=2)]
    rope_theta: Annotated[float, Meta(gt=0)]

    def __post_init__(self) -> None:
        if self.moe_top_k > self.num_experts:
            raise ValueError(f"moe_top_k is {self.moe_top_k}, and there are {self.num_experts} experts")


class Module(Struct, frozen=True):
    """An entry of modules.json."""

    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """The library's class without its module; empty if it is another class."""
        if self.type == "pylate.models.Dense.Dense":
            return "Dense"
        match = _MODULE_TYPE.fullmatch(self.type)
        return match[1] if match else ""


class Transformer(Struct, frozen=True):
    """sentence_bert_config.json."""

    max_seq_length: Count | None = None
    do_lower_case: bool = False
    transformer_task: str = "feature-extraction"


class SentenceTransformers(Struct, frozen=True):
    """config_sentence_transformers.json."""

    model_type: str = "SentenceTransformer"
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    activation_fn: str | None = None
    similarity_fn_name: Similarity | Literal["MaxSim", "maxsim", "meanmaxsim"] | None = None

    @property
    def prompt_texts(self) -> dict[str, str]:
        """The prompts by name; null is an empty one."""
        return {name: text or "" for name, text in self.prompts.items()}


class Tokenizer(Struct, frozen=True):
    """tokenizer_config.json; transformers writes 1e30 for a tokenizer without a maximum."""

    model_max_length: Annotated[float, Meta(ge=1)] | None = None
    truncation_side: TruncationSide = "right"
    tokenizer_class: str | None = None
    # transformers changes tokenizer.json by these, where they are given:
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    add_prefix_space: bool | None = None


class RerankerOverrides(Struct, frozen=True, forbid_unknown_fields=True):
    """`reranker` of noria.json: how a decoder judges a query and a document."""

    template: str | None = None  # with {query}, {document} and perhaps {instruction}; None: the folder's chat template
    instruction: str | None = None
    true_token: str | None = None  # None: as modules.json says, else "yes" and "no"
    false_token: str | None = None


class Overrides(Struct, frozen=True, forbid_unknown_fields=True):
    """noria.json."""

    name: str | None = None  # `models/catalog.py` reads it
    # "splade" is for masked language models, "idf" for opensearch's queries, "none" for the states of tokens, the
    # others for what bge-m3 makes beside its embeddings
    pooling: Literal["splade", "idf", "none", "bge-m3-sparse", "bge-m3-colbert"] | None = None
    reranker: RerankerOverrides | None = None


def make_spec(folder: pathlib.Path, family: Family, **fields: Any) -> EncoderModelSpec:
    """Return the spec of a folder, of plain texts unless `fields` say others; the catalog sets name and fingerprint."""
    texts = {"inputs": ("input_ids", "attention_mask")}
    return EncoderModelSpec(name="", folder=str(folder), fingerprint="", family=family.name, **texts | fields)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Return the keys of config.json, in the names that transformers has for them.

    Raises ModelError: it is damaged, or is of an older form and says what transformers does not compute.
    """
    file = folder / "config.json"
    tree = text_tower(file, read_object(file))
    if tree.get("model_type") == "xlm-roberta" and tree.get("lora_adaptations"):
        return _as_jina(file, tree)
    if tree.get("model_type") != "nomic_bert" or "n_embd" not in tree:
        return tree
    allowed = _EXPERT_VALUES if tree.get("num_experts") else _NOMIC_VALUES
    for key, values in allowed.items():
        if key in tree and tree[key] not in values:
            raise ModelError(f"{file}: {key} is {short_repr(tree[key])}; supported is {short_repr(values[0])}.")
    renamed = {_NOMIC_NAMES.get(key, key): value for key, value in tree.items() if key not in allowed}
    if renamed.get("intermediate_size") is None and isinstance(tree["n_embd"], int):
        renamed["intermediate_size"] = 4 * tree["n_embd"]
    if tree.get("num_experts"):
        convert(file, renamed, _Experts)
        renamed |= {
            "model_type": "jina_embeddings_v3",
            "architectures": ["JinaEmbeddingsV3Model"],
            "hidden_act": "gelu",
        }
    return renamed


def _as_jina(file: pathlib.Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of jina-embeddings-v3 that its own code reads, in transformers' form."""
    if tree.get("position_embedding_type") != "rotary" or not isinstance(tree.get("rotary_emb_base"), int | float):
        raise ModelError(
            f"{file}: lora_adaptations names tasks, and position_embedding_type is "
            f"{short_repr(tree.get('position_embedding_type'))}; of such models those of jina-embeddings-v3 are "
            "supported, with rotary and a rotary_emb_base."
        )
    rope = {"rope_type": "default", "rope_theta": float(tree["rotary_emb_base"])}
    others = {key: value for key, value in tree.items() if key not in ("position_embedding_type", "rotary_emb_base")}
    own = {"model_type": "jina_embeddings_v3", "architectures": ["JinaEmbeddingsV3Model"], "rope_parameters": rope}
    return others | own


def read_modules(folder: pathlib.Path, model_type: object = None) -> list[Module]:
    """Return the entries of modules.json, empty if there is no such file; `model_type` is that of config.json."""
    file = folder / "modules.json"
    if not file.exists():
        return []
    own = _OWN_TRANSFORMERS.get(model_type)
    modules = [
        Module("sentence_transformers.models.Transformer", each.path) if each.type == own else each
        for each in decode_modules(file)
    ]
    for module in modules:
        if not module.name:
            raise ModelError(
                f"{file}: has a module of the type {short_repr(module.type)}; supported are "
                f"{', '.join(_MODULES)} of sentence_transformers."
            )
        is_here = module.path == "." and module.name == "StaticEmbedding"
        if (module.path and not re.fullmatch(r"[\w.-]+", module.path)) or (module.path.startswith(".") and not is_here):
            raise ModelError(f"{file}: the path {short_repr(module.path)} is not the name of a subfolder.")
    names = [module.name for module in modules]
    if not _CHAIN.fullmatch(",".join(names)):
        raise ModelError(
            f"{file}: the modules are {short_list(names) or 'none'}; supported are Transformer, Pooling and then any "
            "Dense and Normalize, in this order, Transformer alone or with LogitScore for a cross-encoder, or with "
            "Normalize for CLIP and SigLIP, or with SpladePooling for a sparse encoder, or with Dense, MultiVectorMask "
            "and Normalize for ColBERT, or StaticEmbedding alone or with Normalize."
        )
    if modules[0].path not in ("", "."):
        raise ModelError(
            f"{file}: the Transformer is in the subfolder {modules[0].path!r}, as sentence-transformers before 1.0 "
            "wrote it. Save the model again with a newer version."
        )
    for module in modules[1:]:
        settings = folder / module.path / "config.json"
        if module.path and settings.exists():
            check_module_keys(settings, read_object(settings), module.name, of_tokens=embeds_tokens(modules))
    return modules


def decode_modules(file: pathlib.Path) -> list[Module]:
    """Return the entries of a modules.json, of any types. Raises ModelError: it is damaged."""
    try:
        return msgspec.json.decode(read_text(file), type=list[Module])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: not a list of sentence-transformers' modules: {error}. {REDOWNLOAD_HINT}") from error


def embeds_tokens(modules: Sequence[Module]) -> bool:
    """Whether the modules are those of a model like ColBERT, whose Dense layers are of tokens."""
    return [module.name for module in modules[:2]] == ["Transformer", "Dense"]


def read_transformer(folder: pathlib.Path) -> Transformer:
    """Read sentence_bert_config.json, or that of another architecture (sentence_roberta_config.json)."""
    file = _transformer_file(folder)
    transformer = read_if_there(file, Transformer)
    if transformer.transformer_task not in _TRANSFORMER_TASKS:
        raise ModelError(
            f"{file}: transformer_task is {short_repr(transformer.transformer_task)}; supported are "
            f"{', '.join(_TRANSFORMER_TASKS)}."
        )
    return transformer


def _transformer_file(folder: pathlib.Path) -> pathlib.Path:
    return next(iter(sorted(folder.glob("sentence_*_config.json"))), folder / TRANSFORMER_FILE)


def check_library_keys(folder: pathlib.Path, *, of_tokens: bool = False, of_tower: bool = False) -> list[str]:
    """Return the keys of sentence-transformers' files that nothing here knows. Raises as `check_file_keys`.

    `of_tokens` says that it is a model like ColBERT, `of_tower` that it is a text tower.
    """
    files = {
        _transformer_file(folder): TRANSFORMER_FILE,
        folder / SENTENCE_TRANSFORMERS_FILE: SENTENCE_TRANSFORMERS_FILE,
    }
    return [
        key
        for file, known in files.items()
        if file.exists()
        for key in check_file_keys(file, read_object(file), known, of_tokens=of_tokens, of_tower=of_tower)
    ]


def read_if_there(file: pathlib.Path, kind: type[T]) -> T:
    """Read a file of which every field has a default, or return the defaults."""
    return convert(file, read_object(file) if file.exists() else {}, kind)


def embedding_settings(file: pathlib.Path, library: SentenceTransformers) -> dict[str, Any]:
    """Return what config_sentence_transformers.json says of embeddings, as fields of `EncoderModelSpec`.

    Raises ModelError: it is of another kind of model, or its parts contradict each other.
    """
    if library.model_type != "SentenceTransformer":
        raise ModelError(
            f"{file}: model_type is {short_repr(library.model_type)}; supported are SentenceTransformer and "
            "CrossEncoder."
        )
    prompts = library.prompt_texts
    default = library.default_prompt_name
    if default is not None and default not in prompts:
        raise ModelError(
            f"{file}: default_prompt_name is {short_repr(default)}, which is "
            f"not among the prompts {short_list(map(short_repr, prompts)) or '(there are none)'}."
        )
    name = library.similarity_fn_name
    if name in ("MaxSim", "maxsim", "meanmaxsim"):
        raise ModelError(
            f"{file}: similarity_fn_name is {name!r}, which is of vectors of tokens; supported are "
            f"{', '.join(get_args(Similarity))}."
        )
    return {"prompts": tuple(prompts.items()), "default_prompt": default, "similarity": name or "cosine"}
