"""GET /v1/models describes what POST /t2i accepts; OpenAI's clients accept the extra field."""

import msgspec
import openai
import pytest

from noria.config import FrontendConfig
from noria.frontend.protocols.openai.models import capabilities_of
from noria.frontend.services.images.request_validation import limits
from noria.protocol.request import ImageRequestBody


@pytest.fixture
def capabilities(client):
    (card,) = client.get("/v1/models").json()["data"]
    return card["noria"]


def test_capabilities_have_every_limit_under_the_names_of_the_body(capabilities, spec):
    config = FrontendConfig(max_images=4, max_steps=100, max_prompt_chars=200)
    assert set(capabilities["settings"]) == set(limits(spec, config)) <= set(ImageRequestBody.__struct_fields__)
    assert capabilities["settings"]["width"] == {"min": 16, "max": 128, "multiple": 8, "default": 64}
    assert capabilities["settings"]["n"]["max"] == 4
    assert capabilities["settings"]["seed"]["default"] is None
    assert (capabilities["version"], capabilities["pipeline"]) == (spec.fingerprint, spec.pipeline)
    assert capabilities["max_prompt_chars"] == 200


def test_every_scheduler_has_a_description(capabilities, spec):
    assert [each["name"] for each in capabilities["schedulers"]] == list(spec.schedulers)
    assert all(each["description"] for each in capabilities["schedulers"])
    assert capabilities["default_scheduler"] == spec.default_scheduler


def test_the_default_settings_are_accepted(client, capabilities):
    defaults = {field: bounds["default"] for field, bounds in capabilities["settings"].items()}
    assert client.post("/t2i", json={"prompt": "p"} | defaults).status_code == 200


def test_one_model_has_the_same_capabilities_as_in_the_list(client, capabilities):
    assert client.get("/v1/models/tiny").json()["noria"] == capabilities


def test_openais_client_accepts_the_field(url, capabilities):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as official:
        assert official.models.retrieve("tiny").noria == capabilities
        assert [model.noria for model in official.models.list()] == [capabilities]


def test_capabilities_have_the_limits_of_loras_and_start_images(client, capabilities):
    limit = capabilities["max_loras"] + 1
    too_many = client.post("/t2i", json={"prompt": "p", "loras": [{"name": "ink"}] * limit}).json()["error"]
    assert f"has {limit} entries; at most {limit - 1}" in too_many["message"]
    weight = capabilities["max_lora_weight"]
    too_strong = client.post("/t2i", json={"prompt": "p", "loras": [{"name": "ink", "weight": weight + 1}]})
    assert f"allowed are {-weight} to {weight}" in too_strong.json()["error"]["message"]
    too_many = client.post(
        "/t2i", json={"prompt": "p", "controls": [{"name": "a"}] * (capabilities["max_controls"] + 1)}
    )
    assert too_many.json()["error"]["param"] == "controls"
    assert f"at most {capabilities['max_controls']}" in too_many.json()["error"]["message"]
    assert capabilities["max_control_scale"] == 2.0
    assert capabilities["start_image"]["default_strength"] >= capabilities["settings"]["strength"]["min"]


def test_capabilities_have_the_operators_limits(spec):
    capabilities = capabilities_of(spec, FrontendConfig(max_steps=5, max_image_bytes=2048), ["ink"], ["edges"])
    assert capabilities.start_image.max_bytes == 2048
    assert (capabilities.loras, capabilities.controlnets) == (["ink"], ["edges"])
    assert msgspec.to_builtins(capabilities.settings["inference_steps"])["default"] == 5


def test_a_model_without_start_images_and_loras_offers_none(spec):
    other = msgspec.structs.replace(spec, takes_start_images=False, takes_loras=False)
    capabilities = capabilities_of(other, FrontendConfig(), ["ink"], [])
    assert (capabilities.start_image, capabilities.loras) == (None, [])
