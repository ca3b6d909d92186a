"""Folders of kinds that people own and that are not served: one line says what each is."""

import pathlib
from typing import Any

import pytest

from encoders import write_json
from noria.errors import ModelError
from noria.models.catalog import open_model

ST = "sentence_transformers.models"
DECODER = "is a decoder: each token sees only those before it; supported are encoders"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}}, f"qwen3 {DECODER}"),
        ({"config.json": {"model_type": "llama", "architectures": ["LlamaModel"]},
          "modules.json": [{"type": f"{ST}.Transformer"}, {"type": f"{ST}.Pooling"}]}, f"llama {DECODER}"),
        ({"config.json": {"model_type": "mistral", "architectures": ["MistralModel"], "vocab_size": 1}},
         f"mistral {DECODER}. A decoder that embeds, as Qwen3-Embedding, has a Pooling in modules.json"),
        ({"config.json": {"model_type": "gemma3_text"}}, f"gemma3_text {DECODER}"),
        ({"config.json": {"model_type": "new_one", "architectures": ["NewOneForCausalLM"]}}, f"new_one {DECODER}"),
        ({"config.json": {"model_type": "t5", "is_encoder_decoder": True}}, "t5 is an encoder with a decoder"),
        ({"modules.json": [{"type": f"{ST}.StaticEmbedding"}]}, "modules.json: a static embedding without config"),
        ({"modules.json": [{"type": f"{ST}.Transformer", "path": "0_Transformer"}]}, "config.json is missing beside"),
        ({"modules.json": [{"type": f"{ST}.WordEmbeddings"}]}, "the first module is '.*WordEmbeddings'"),
        ({"modules.json": [1]}, "not a list of sentence-transformers' modules"),
        ({"adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "x/y"}},
         "one of PEFT .'LORA'.. Merge it into its base, 'x/y', by merge_and_unload"),
        ({"adapter_config.json": {}, "config.json": {"model_type": "bert", "vocab_size": 1}}, "into its base by"),
        ({"model-Q4_K_M.gguf": None}, "a GGUF file is no folder of a model.*noria serve FILE.gguf --parts"),
        ({"pytorch_lora_weights.safetensors": None}, "a LoRA adapter. Name its folder in engine.loras"),
        ({"sd_xl_base_1.0.safetensors": None}, "weights alone.*with --checkpoints FOLDER"),
        ({"b/model_index.json": {}, "a/model_index.json": {}}, "a folder of models. Give one, such as .*a, or all"),
        ({"config.json": {"_class_name": "ControlNetModel"}}, "config.json: a ControlNet. Name its folder in engine."),
        ({"config.json": {"_class_name": "AutoencoderKL"}}, "config.json: the part AutoencoderKL of a model of diffus"),
        ({"config.json": {"model_type": "longformer"}}, "which no model family has. Known are: albert, bert"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_short_line_with_the_reason(tmp_path: pathlib.Path, files: dict[str, Any], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if content is None:
            (tmp_path / name).touch()
        else:
            write_json(tmp_path / name, content)
    with pytest.raises(ModelError, match=words) as rejected:
        open_model(str(tmp_path))
    message = rejected.value.message.replace(str(tmp_path), "")
    assert len(message) < 500 and "\n" not in message
