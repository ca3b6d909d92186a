"""The classes of transformers that are served as text encoders."""

from collections.abc import Mapping

from noria.protocol.text import EncoderTask

CLASS_PREFIXES: Mapping[str, str] = {
    "albert": "Albert",
    "bert": "Bert",
    "camembert": "Camembert",
    "data2vec-text": "Data2VecText",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "ernie": "Ernie",
    "eurobert": "EuroBert",
    "gemma3_text": "Gemma3Text",
    "gte": "Gte",
    "jina_embeddings_v3": "JinaEmbeddingsV3",
    "megatron-bert": "MegatronBert",
    "mistral": "Mistral",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "nomic_bert": "NomicBert",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "rembert": "RemBert",
    "roberta": "Roberta",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "roformer": "RoFormer",
    "squeezebert": "SqueezeBert",
    "xlm-roberta": "XLMRoberta",
    "xlm-roberta-xl": "XLMRobertaXL",
}
"""The start of the classes' names by `model_type`. Encoders whose result for a text depends on padding are left out."""

CAUSAL = frozenset({"mistral", "qwen2", "qwen3"})
"""Model types of decoders that embed: each token sees only those before it."""

EMBEDDING_ONLY = CAUSAL | {"gemma3_text"}
"""Model types whose other classes are of decoders."""

OFFSET_POSITIONS = frozenset(
    {"camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
)
"""Model types that number tokens from `pad_token_id` + 1: the first rows of their position table are not tokens'."""

PACKED = frozenset(CLASS_PREFIXES) - {
    "deberta",  # these have attention of their own, which transformers' interface does not reach
    "deberta-v2",
    "megatron-bert",
    "mpnet",
    "rembert",
    "roformer",
    "squeezebert",
}
"""Model types whose texts can follow each other in one sequence, without padding."""

HEADS: Mapping[str, EncoderTask] = {
    "Model": "embedding",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForMaskedLM": "sparse_embedding",
}
"""The task of a model, by the end of its class's name."""

PRETRAINING_HEADS = frozenset({"ForMaskedLM", "ForPreTraining"})
"""Classes that end like this are served without their head, as embeddings, if nothing says that they are sparse."""

POOLED_CLASSES = frozenset(
    prefix + head
    for prefix in CLASS_PREFIXES.values()
    for head in (
        *HEADS, "ForPreTraining", "ForCausalLM", "ForMultipleChoice", "ForNextSentencePrediction",
        "ForQuestionAnswering", "LMHeadModel",
    )
)  # fmt: skip
"""Classes of a folder with a pooling, which is loaded by its `model_type`, without the head."""

TASK_FOLDERS: Mapping[str, str] = {
    task: task.replace(".", "_").replace("-", "_")
    for task in ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
}
"""The tasks of jina-embeddings-v3, and the subfolders of their adapters."""

DENSE_PATHS = "[0-9]*_Dense*"
"""The names of the subfolders in which sentence-transformers' modules Dense may have their weights."""

CLASSES = tuple(
    prefix + head
    for model_type, prefix in CLASS_PREFIXES.items()
    for head, task in HEADS.items()
    if task == "embedding" or model_type not in EMBEDDING_ONLY
)
