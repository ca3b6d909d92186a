"""The card of a version: fields that the hub's own library reads, and text that stays text."""

from huggingface_hub import ModelCard

from noria.registry.lineage.nodes import NodeId
from noria.registry.lineage.trace import trace
from noria.registry.model_card import model_card
from noria.registry.versions import find_version
from sample_registry import HOSTILE, run_id


def card_of(engine, name):
    with engine.connect() as connection:
        version = find_version(connection, name)
        subject = [NodeId("model", version.digest)]
        return version, model_card(version, trace(connection, subject, "up"), trace(connection, subject, "down"))


def test_the_hubs_library_reads_the_fields(month_old):
    version, text = card_of(month_old, "shapes@3")
    data = ModelCard(text, ignore_metadata_errors=False).data
    assert (data.model_name, data.library_name, data.pipeline_tag) == ("shapes", "diffusers", "text-to-image")
    assert data.datasets == ["/data/latents", "/data/scenes", "/data/words", "raw/2026-10"]
    assert (data.noria["digest"], data.noria["version"]) == (version.digest, 3)
    assert set(data.noria["runs"]) == {run_id(name) for name in ("train unet", "encode latents", "draw scenes")}


def test_the_text_has_the_runs_the_data_and_where_it_serves(month_old):
    _, text = card_of(month_old, "shapes@3")
    assert r"| deployed to | t2i \(serving\) |" in text
    assert "batch = 256, rate = 0.001, schedule = cosine | fid = 12.4, loss = 0.0471 |" in text
    assert "| s3://studio raw/2026-10 | 2026-10-31 |" in text
    _, text = card_of(month_old, "minilm@1")
    assert "Nothing is recorded about how it was made." in text


def test_names_and_reasons_mean_nothing_to_markdown(month_old):
    _, text = card_of(month_old, "shapes@4")
    assert HOSTILE not in text
    assert r"\<img src=x onerror=" in text
