"""What GET /v1/models offers is what POST /t2i takes, and OpenAI's clients pass over it."""

import msgspec
import openai
import pytest

from noria.config import FrontendConfig
from noria.frontend.services.admission import limits
from noria.frontend.services.model_capabilities import capabilities_of
from noria.protocol.request import ImageRequestBody


@pytest.fixture
def offer(client):
    (card,) = client.get("/v1/models").json()["data"]
    return card["noria"]


def test_an_offer_has_every_limit_and_the_names_are_those_of_a_body(offer, spec):
    config = FrontendConfig(max_images=4, max_steps=100, max_prompt_chars=200)
    assert set(offer["settings"]) == set(limits(spec, config)) <= set(ImageRequestBody.__struct_fields__)
    assert offer["settings"]["width"] == {"min": 16, "max": 128, "multiple": 8, "default": 64}
    assert offer["settings"]["n"]["max"] == 4
    assert offer["settings"]["seed"]["default"] is None
    assert (offer["version"], offer["pipeline"]) == (spec.fingerprint, spec.pipeline)
    assert offer["max_prompt_chars"] == 200


def test_every_scheduler_is_offered_with_a_word_on_it(offer, spec):
    assert [each["name"] for each in offer["schedulers"]] == list(spec.schedulers)
    assert all(each["description"] for each in offer["schedulers"])
    assert offer["default_scheduler"] == spec.default_scheduler


def test_all_that_is_offered_by_default_is_taken(client, offer):
    defaults = {field: bounds["default"] for field, bounds in offer["settings"].items()}
    assert client.post("/t2i", json={"prompt": "p"} | defaults).status_code == 200


def test_one_model_is_offered_as_in_the_list(client, offer):
    assert client.get("/v1/models/tiny").json()["noria"] == offer


def test_openais_client_reads_on(url, offer):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as official:
        assert official.models.retrieve("tiny").noria == offer
        assert [model.noria for model in official.models.list()] == [offer]


def test_the_operators_bounds_are_offered(spec):
    offer = capabilities_of(spec, FrontendConfig(max_steps=5))
    assert msgspec.to_builtins(offer.settings["inference_steps"])["default"] == 5
