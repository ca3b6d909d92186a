"""Noria's JSON: lossless, and invalid text is rejected."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria import __version__
from noria.errors import ImageFileError, InvalidField
from noria.images.metadata import GenerationMetadata, from_json, metadata_for, to_json
from noria.models.catalog import open_model
from noria.protocol.diffusion import IpAdapter, Refinement, SecondPass
from noria.protocol.request import TwoPassRequestBody
from noria.protocol.routes import Target
from noria.testing.requests import make_image_request


@given(
    st.builds(
        GenerationMetadata,
        prompt=st.text(),
        negative_prompt=st.text(),
        seed=st.integers(0, 2**63 - 1) | st.none(),
        guidance_scale=st.floats(0, 50) | st.none(),
        scheduler=st.text() | st.none(),
        other=st.dictionaries(st.text(), st.text()),
    )
)
def test_json_is_lossless(metadata):
    assert from_json(to_json(metadata)) == metadata
    assert from_json(to_json(metadata).decode()) == metadata


def test_settings_have_the_field_names_of_t2i():
    about_the_model = {"model", "model_version", "deployment", "registered_version", "model_digest"}
    facts = {"noria", "other", "image_digest", "mask_digest", "safety_score"}
    settings = set(GenerationMetadata.__struct_fields__) - about_the_model - facts
    assert settings < set(TwoPassRequestBody.__struct_fields__)


START_IMAGE = {"strength": 0.6, "has_mask": True, "image_digest": "0123456789ab", "mask_digest": "ba9876543210"}


def test_metadata_are_of_one_image_and_complete(bundled_folder):
    spec = open_model(str(bundled_folder))
    request = make_image_request(
        "id",
        spec.name,
        negative_prompt="q",
        width=64,
        height=96,
        n=3,
        ip_adapter=IpAdapter("plus"),
        refiner=Refinement(),
        second_pass=SecondPass(128, 192, 20, 0.7),
        prompt_syntax="a1111",
        clip_skip=2,
        **START_IMAGE,
    )
    target = Target(7, "shapes@2", "sha256:12", spec.fingerprint, ())
    metadata = metadata_for(request, spec, seed=9, target=target, safety_score=0.1)
    assert metadata.seed == 9
    assert (metadata.deployment, metadata.registered_version, metadata.model_digest) == (7, "shapes@2", "sha256:12")
    assert (metadata.width, metadata.height) == (64, 96)
    assert (metadata.model, metadata.model_version, metadata.noria) == (spec.name, spec.fingerprint, __version__)
    assert None not in msgspec.structs.astuple(metadata)


def test_unknown_keys_are_ignored():
    assert from_json('{"prompt": "p", "lora": ["x"]}') == GenerationMetadata("p")


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "{}", '{"prompt": 1}', '{"prompt": "p", "seed": "7"}', "[" * 100_000, b"\xff", '"\\ud800"'],
)
def test_invalid_json_is_rejected(text):
    with pytest.raises(ImageFileError, match="are not what Noria writes"):
        from_json(text)


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_an_unpaired_surrogate_is_rejected(field):
    with pytest.raises(InvalidField, match="at character 2"):
        GenerationMetadata(**({"prompt": "p"} | {field: "ab\ud83d"}))
