"""The keys of an encoder's configuration files: which are read, which change nothing, and which values are rejected.

A key that is in none of these tables, and has a value that does not say "off", is reported (`EncoderModelSpec.
unread_keys`): it may belong to code that is not run here. Tests compare the tables with the installed libraries.
"""

import itertools
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from noria.errors import ModelError, short_repr
from noria.protocol.text import Pooling


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


POOLING_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older keys of a pooling, in the order in which sentence-transformers concatenates them."""

_BERT = _keys(
    "hidden_act hidden_size intermediate_size layer_norm_eps max_position_embeddings num_attention_heads "
    "num_hidden_layers pad_token_id type_vocab_size vocab_size"
)
_DEBERTA = _BERT | _keys(
    "embedding_size legacy max_relative_positions pooler_hidden_act pooler_hidden_size pos_att_type "
    "position_biased_input relative_attention"
)
_ROTARY = frozenset({"head_dim", "partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"})

_LLAMA = (_BERT - {"layer_norm_eps", "type_vocab_size"}) | _ROTARY | _keys("num_key_value_heads rms_norm_eps")
_QWEN = _LLAMA | _keys("layer_types max_window_layers sliding_window use_sliding_window")

_TOWER = _BERT - {"type_vocab_size"}
_IMAGE_TOWER = (_TOWER - _keys("max_position_embeddings pad_token_id vocab_size")) | _keys(
    "image_size num_channels patch_size"
)

READ_KEYS: Mapping[str, frozenset[str]] = {
    "albert": _BERT | {"embedding_size", "inner_group_num", "num_hidden_groups"},
    "bert": _BERT,
    "camembert": _BERT,
    "clip_text_model": _TOWER | {"eos_token_id", "projection_dim"},
    "clip_vision_model": _IMAGE_TOWER | {"projection_dim"},
    "data2vec-text": _BERT,
    "deberta": _DEBERTA | {"talking_head"},
    "deberta-v2": _DEBERTA
    | _keys("attention_head_size conv_act conv_groups conv_kernel_size norm_rel_ebd position_buckets share_att_key"),
    "distilbert": _keys(
        "activation dim hidden_dim hidden_size max_position_embeddings n_heads n_layers num_attention_heads "
        "num_hidden_layers pad_token_id sinusoidal_pos_embds vocab_size"
    ),
    "electra": _BERT | {"embedding_size"},
    "ernie": _BERT | {"task_type_vocab_size", "use_task_id"},
    "eurobert": (_BERT - {"layer_norm_eps", "type_vocab_size"})
    | _ROTARY
    | {"attention_bias", "classifier_pooling", "mlp_bias", "num_key_value_heads", "rms_norm_eps"},
    "gemma3_text": (_BERT - {"hidden_act", "layer_norm_eps", "type_vocab_size"})
    | _ROTARY
    | _keys(
        "_sliding_window_pattern attention_bias hidden_activation layer_types num_key_value_heads "
        "query_pre_attn_scalar rms_norm_eps rope_local_base_freq sliding_window sliding_window_pattern "
        "use_bidirectional_attention"
    ),
    "gte": _BERT | _ROTARY,
    "jina_embeddings_v3": _BERT
    | _ROTARY
    | _keys("lora_adaptations lora_alpha lora_rank moe_every_n_layers moe_top_k num_experts task_instructions"),
    "megatron-bert": _BERT,
    "mistral": _LLAMA | {"sliding_window"},
    "modernbert": (_BERT - {"hidden_act", "layer_norm_eps", "type_vocab_size"})
    | _ROTARY
    | _keys(
        "attention_bias classifier_activation classifier_bias classifier_pooling global_attn_every_n_layers "
        "global_rope_theta hidden_activation layer_types local_attention local_rope_theta mlp_bias norm_bias norm_eps "
        "sliding_window"
    ),
    "mpnet": (_BERT - {"type_vocab_size"}) | {"relative_attention_num_buckets"},
    "nomic_bert": _BERT | _ROTARY,
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"attention_bias"},
    "rembert": _BERT | {"input_embedding_size", "output_embedding_size"},
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT,
    "roformer": _BERT | {"embedding_size", "rotary_value"},
    "siglip_text_model": _TOWER | {"projection_size"},
    "siglip_vision_model": _IMAGE_TOWER | {"vision_use_head"},
    "siglip2_text_model": _TOWER | {"projection_size"},
    "siglip2_vision_model": (_IMAGE_TOWER - {"image_size"}) | {"num_patches", "vision_use_head"},
    "squeezebert": _BERT
    | _keys("embedding_size intermediate_groups k_groups output_groups post_attention_groups q_groups v_groups"),
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT,
}
"""Keys of config.json that transformers' class of a `model_type` computes with."""

_READ_HERE = _keys(
    "architectures id2label is_decoder label2id matryoshka_dimensions model_type num_labels problem_type "
    "sbert_ce_default_activation_function sentence_transformers"
)

_ACTIVATION_KEYS = _keys("activation classifier_activation conv_act hidden_act hidden_activation pooler_hidden_act")
ACTIVATIONS = _keys(
    "gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace "
    "leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu"
)
"""transformers' activation functions between layers."""

HARMLESS_KEYS = _keys(
    # where a model comes from, and notes
    "_name_or_path _commit_hash adapters author base_model description finetuning_task language license max_seq_length "
    "model_name name_or_path tags task_specific_params transformers_version transformers.js_config version "
    # code, files and precision: the loader chooses them itself
    "_attn_implementation _attn_implementation_autoset attn_implementation auto_map custom_pipelines dtype fp16 bf16 "
    "memory_efficient fused_bias_fc fused_dropout_add_ln reference_compile repad_logits_with_grad torch_dtype "
    "torchscript unpad_inputs unpad_no_grad use_bfloat16 use_flash_attn use_memory_efficient_attention use_xentropy "
    "deterministic_flash_attn chunk_size_feed_forward "
    # training
    "attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout classifier_dropout_prob cls_dropout "
    "directionality dropout embd_pdrop embedding_dropout gradient_checkpointing hidden_dropout hidden_dropout_prob "
    "load_trained_adapters lora_dropout_p lora_main_params_trainable moe_impl moe_resid_pdrop router_aux_loss_coef "
    "initializer_cutoff_factor initializer_factor initializer_range label_smoothing mask_token_id mlp_dropout "
    "pad_vocab_size_multiple pooler_dropout qa_dropout resid_pdrop seq_classif_dropout sparse_pred_ignore_index "
    "sparse_prediction summary_first_dropout summary_last_dropout "
    # heads that are not served, and generation
    "add_cross_attention bos_token_id cls_token_id decoder_bias decoder_start_token_id dense_seq_output eos_token_id "
    "sep_token_id last_layer_subset net_structure_type num_choices pooler_fc_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type pretraining_tp pack_qkv num_memory_blocks "
    "summary_activation summary_proj_to_labels summary_type summary_use_proj tie_weights_ tie_word_embeddings "
    "use_cache output_past return_dict output_attentions output_hidden_states keys_to_ignore_at_inference "
    "down_scale_factor gap_size "
    # generation, in older configurations of a text tower
    "bad_words_ids begin_suppress_tokens cross_attention_hidden_size diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature "
    "tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p typical_p "
    # the scale of a text tower's logits for images
    "logit_scale_init_value"
)
"""Keys of config.json that change no result of an encoder."""

_MAX_REPORTED, _MAX_KEY_CHARS = 20, 60  # a file may have a million keys
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {})
_ABSOLUTE = (*_OFF, "absolute")
_ROPE = (*_ABSOLUTE, "rope", "rotary")
_REJECTED: Mapping[str, tuple[Any, ...]] = {
    "alibi_starting_size": _OFF,
    "attn_logit_softcapping": _OFF,
    "emb_pooler": _OFF,
    "feed_forward_type": (*_OFF, "original"),
    "final_logit_softcapping": _OFF,
    "function_to_apply": _OFF,
    "is_causal": _OFF,
    "is_encoder_decoder": _OFF,
    "layer_norm_type": (*_OFF, "layer_norm"),
    "logn_attention_clip1": _OFF,
    "logn_attention_scale": _OFF,
    "lora_adaptations": _OFF,
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    "per_layer_config": _OFF,
    "position_embedding_type": _ABSOLUTE,
    "pruned_heads": _OFF,
    "query_pre_attn_scalar": _OFF,
    "rope_scaling": _OFF,  # here and below: of model types that do not read it
    "rope_parameters": _OFF,
    "rotary_scaling_factor": _OFF,
    "sliding_window": _OFF,
    "use_alibi": _OFF,
    "use_qk_norm": _OFF,
    "use_rms_norm": _OFF,
    "use_sliding_window": _OFF,
}
"""Keys of config.json that other code computes with, and their values that say it does what transformers does."""

FILE_KEYS: Mapping[str, tuple[Collection[str], Mapping[str, tuple[Any, ...]]]] = {
    "sentence_bert_config.json": (
        ("do_lower_case", "max_seq_length", "transformer_task", "unpad_inputs", "tokenizer_name_or_path"),
        {
            "config_args": _OFF,
            "config_kwargs": _OFF,
            "document_length": _OFF,
            "modality_config": (
                *_OFF,
                {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                {"text": {"method": "forward", "method_output_name": "logits"}},
                {"text": {"method": "forward", "method_output_name": "logits"},
                 "message": {"method": "forward", "method_output_name": "logits", "format": "flat"}},
            ),
            "model_args": _OFF,
            "model_kwargs": _OFF,
            "module_output_name": (*_OFF, "token_embeddings", "scores", "causal_logits"),
            "processing_kwargs": _OFF,
            "processor_kwargs": _OFF,
            "query_expansion": _OFF,
            "query_length": _OFF,
            "tokenizer_args": _OFF,
        },
    ),
    "config_sentence_transformers.json": (
        ("__version__", "activation_fn", "default_prompt_name", "keep_in_fp32_modules", "model_type", "prompts",
         "requirements", "similarity_fn_name"),
        {"max_active_dims": _OFF, "truncate_dim": _OFF},
    ),
}  # fmt: skip
"""Keys of sentence-transformers' files: those that are read or change nothing, and the values allowed of others."""

_PADDED = {"padding": "max_length"}
TOWER_VALUES: Mapping[str, tuple[Any, ...]] = {
    "modality_config": (
        *_OFF,
        *(
            {kind: {"method": f"get_{kind}_features", "method_output_name": output} for kind in ("text", "image")}
            for output in ("pooler_output", None)
        ),
    ),
    "module_output_name": (*_OFF, "sentence_embedding"),
    "processing_kwargs": (*_OFF, {"text": _PADDED}, {"text": _PADDED | {"truncation": True}}),
}
"""The values allowed in sentence-transformers' files of a text tower, in place of those of `FILE_KEYS`."""

LATE_INTERACTION_KEYS = _keys(
    "attend_to_expansion_tokens do_query_expansion document_length document_prefix query_expansion query_length "
    "query_prefix skiplist_words"
)
"""Keys of sentence-transformers' files that models like ColBERT have."""

_SENTENCE_EMBEDDING, _TOKEN_EMBEDDINGS = (*_OFF, "sentence_embedding"), (*_OFF, "token_embeddings")
MODULE_KEYS: Mapping[str, tuple[Collection[str], Mapping[str, tuple[Any, ...]]]] = {
    "Pooling": (
        ("embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *POOLING_FLAGS),
        {},
    ),
    "Dense": (
        ("in_features", "out_features", "bias", "activation_function"),
        {
            "module_input_name": _SENTENCE_EMBEDDING,
            "module_output_name": _SENTENCE_EMBEDDING,
            "use_residual": _OFF,
        },
    ),
    "LogitScore": (("true_token_id", "false_token_id"), {"module_input_name": (*_OFF, "causal_logits")}),
    "SpladePooling": (
        ("pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension", "chunk_size"),
        {},
    ),
    "MultiVectorMask": (("skiplist_words", "skiplist_tasks"), {"keep_only_token_ids": _OFF}),
    "Normalize": ((), {"module_input_name": _SENTENCE_EMBEDDING, "module_output_name": _SENTENCE_EMBEDDING}),
}
"""Likewise of the config.json of a module."""


def check_model_keys(file: pathlib.Path, tree: Mapping[str, Any], model_type: str) -> list[str]:
    """Return the keys of config.json that nothing here knows, with their values.

    Raises ModelError: a key says that the model computes what it would not do here.
    """
    read = READ_KEYS[model_type]
    for key in sorted(read & _ACTIVATION_KEYS & tree.keys()):
        if tree[key] is not None and tree[key] not in list(ACTIVATIONS):
            raise ModelError(
                f"{file}: {key} is {short_repr(tree[key])}, and transformers has no activation function of this name; "
                f"supported are {', '.join(sorted(ACTIVATIONS))}."
            )
    allowed = dict(_REJECTED)
    if read >= _ROTARY:
        allowed["position_embedding_type"] = _ROPE
    return _check(file, tree, (*read, *_READ_HERE, *HARMLESS_KEYS), allowed)


def check_file_keys(
    file: pathlib.Path, tree: Mapping[str, Any], known: str, *, of_tokens: bool = False, of_tower: bool = False
) -> list[str]:
    """Do as `check_model_keys`, for a file that sentence-transformers reads; `known` is a key of `FILE_KEYS`."""
    keys, allowed = FILE_KEYS[known]
    if of_tower:
        allowed = {key: TOWER_VALUES.get(key, values) for key, values in allowed.items()}
    return _check(file, tree, (*keys, *LATE_INTERACTION_KEYS) if of_tokens else keys, allowed)


def check_module_keys(file: pathlib.Path, tree: Mapping[str, Any], module: str, *, of_tokens: bool) -> None:
    """Check the config.json of a module: a key that the library's class does not have is rejected."""
    keys, allowed = MODULE_KEYS[module]
    if of_tokens:
        allowed = {key: _TOKEN_EMBEDDINGS if key.startswith("module_") else values for key, values in allowed.items()}
    unknown = _check(file, tree, keys, allowed)
    if unknown:
        raise ModelError(f"{file}: {unknown[0]}: sentence-transformers' {module} has no such setting.")


def _check(
    file: pathlib.Path, tree: Mapping[str, Any], known: Collection[str], allowed: Mapping[str, tuple[Any, ...]]
) -> list[str]:
    for key in sorted(allowed.keys() & tree.keys() - set(known)):
        if tree[key] not in allowed[key]:
            likely = [value for value in allowed[key] if value not in _OFF]
            what = f"supported are {', '.join(map(short_repr, likely))}, or none" if likely else "this is not supported"
            raise ModelError(f"{file}: {key} is {short_repr(tree[key])}, which changes the result; {what}.")
    unknown = (key for key in sorted(tree.keys() - {*known, *allowed}) if tree[key] not in _OFF)
    return [f"{key[:_MAX_KEY_CHARS]} ({short_repr(tree[key])})" for key in itertools.islice(unknown, _MAX_REPORTED)]
