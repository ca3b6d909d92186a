"""A model's folder chooses no code that its loaders import or download."""

import json
import shutil

import pytest

from noria.errors import ModelError
from noria.models.catalog import open_model

PARTS = ("text_encoder/config.json", "unet/config.json", "vae/config.json", "tokenizer/tokenizer_config.json")
KEYS = {
    "attn_implementation": "someone/kernels",
    "_attn_implementation": "flash_attention_2",
    "_attn_implementation_internal": {"": "someone/kernels"},
    "quantization_config": {"quant_method": "bitsandbytes"},
    "auto_map": {"AutoModel": "code.Model"},
    "text_config": {"deeper": [{"attn_implementation": "someone/kernels"}]},
}


@pytest.fixture
def folder(bundled_folder, tmp_path):
    return shutil.copytree(bundled_folder, tmp_path / "model")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_key_that_chooses_code_is_rejected_by_name(folder):
    for part in PARTS:
        before = (folder / part).read_text()
        for key, value in KEYS.items():
            edit(folder / part, **{key: value})
            with pytest.raises(ModelError, match=f"{part}: (_?attn_implementation|{key})"):
                open_model(str(folder))
            (folder / part).write_text(before)


def test_values_that_the_libraries_write_are_accepted(folder):
    for value in (None, "eager", "sdpa"):
        for part in PARTS:
            edit(folder / part, _attn_implementation=value, quantization_config=None)
        assert open_model(str(folder)).name == "noria-shapes"


def test_an_adapter_in_place_of_a_part_is_rejected(folder):
    (folder / "unet/adapter_config.json").write_text('{"base_model_name_or_path": "someone/model"}')
    with pytest.raises(ModelError, match=r"adapter_config\.json: adapters are not supported"):
        open_model(str(folder))
