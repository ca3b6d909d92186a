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
    "gte": "Gte",
    "megatron-bert": "MegatronBert",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "nomic_bert": "NomicBert",
    "rembert": "RemBert",
    "roberta": "Roberta",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "roformer": "RoFormer",
    "squeezebert": "SqueezeBert",
    "xlm-roberta": "XLMRoberta",
    "xlm-roberta-xl": "XLMRobertaXL",
}
"""The start of the classes' names by `model_type`. Encoders whose result for a text depends on padding are left out."""

OFFSET_POSITIONS = frozenset(
    {"camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
)
"""Model types that number tokens from `pad_token_id` + 1: the first rows of their position table are not tokens'."""

HEADS: Mapping[str, EncoderTask] = {
    "Model": "embedding",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
}
"""What a model computes, by the end of its class's name."""

PRETRAINING_HEADS = frozenset({"ForMaskedLM", "ForPreTraining"})
"""Classes that end like this are served without their head, as embeddings."""

CLASSES = tuple(prefix + head for prefix in CLASS_PREFIXES.values() for head in HEADS)
