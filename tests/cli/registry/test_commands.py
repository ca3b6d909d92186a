"""`noria models`: the bundled model through its life in a registry."""

import functools
import json
import re
import shutil

import pytest
from PIL import Image

from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import save_options
from noria.models.catalog import open_model
from noria.protocol.diffusion import Control, Lora, Reference, Refinement
from noria.registry.lineage import trace as noria_trace


def test_a_version_is_added_named_shown_and_removed(noria, bundled_folder):
    assert noria("models", "list") == "no versions; add one: noria models add NAME SOURCE\n"
    added = noria("models", "add", "shapes", "bundled", "--alias", "prod", "--why", "to try")
    assert added.startswith("added shapes@1\n")
    version = json.loads(noria("models", "add", "shapes", str(bundled_folder), "--json"))
    assert (version["number"], version["aliases"], version["kind"]) == (1, ["prod"], "diffusion")
    assert version["urls"] == [bundled_folder.as_uri(), "noria:bundled"]
    header, row = noria("models", "list").splitlines()
    assert header.split() == ["version", "aliases", "tags", "kind", "size", "digest", "added", "by", "source"]
    assert row.split()[:2] == ["shapes@1", "prod"]
    shown = noria("models", "show", "shapes@prod")
    assert version["digest"] in shown and "  unet/config.json\n" in shown and "prod → shapes@1" in shown
    assert json.loads(noria("models", "show", "shapes", "--json"))["files"]["model_index.json"]
    assert "named by the alias prod" in noria("models", "remove", "shapes@1", status=2)
    assert noria("models", "alias", "shapes", "prod", "--delete") == "shapes has no alias prod any more\n"
    assert noria("models", "remove", "shapes@1").startswith("removed shapes@1; its files are still in file://")
    assert noria("models", "list", "shapes").startswith("no versions")
    assert "(removed)" in noria("models", "list", "--removed")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("add", "a b", "bundled"), 2, "the model name 'a b' is not allowed"),
        (
            ("add", "shapes", "nowhere"),
            3,
            "no such folder: nowhere. Give a model folder, bundled, minilm, a file .safetensors or .gguf, hf:",
        ),
        (("add", "shapes", "bundled", "--dataset", "file:///scenes"), 2, "has no version; allowed is URI@VERSION"),
        (("show", "shapes"), 2, "there is no model 'shapes'. There is none yet: noria models add NAME SOURCE."),
        (("alias", "shapes@1", "prod"), 2, "there is no model 'shapes'"),
        (("tag", "shapes@1", "prod"), 2, "the tag 'prod' is not allowed; allowed is KEY=VALUE"),
    ],
)
def test_what_is_wrong_is_one_line(noria, arguments, status, words):
    printed = noria("models", *arguments, status=status)
    assert words in printed and printed.count("\n") == 1


def test_a_version_is_tagged_listed_by_its_tag_and_found_by_it(noria, bundled_folder, tmp_path):
    noria("models", "add", "shapes", "bundled")
    shutil.copytree(bundled_folder, tmp_path / "second")
    (tmp_path / "second" / "noria.json").write_text("{}")
    noria("models", "add", "shapes", str(tmp_path / "second"))
    tagged = noria("models", "tag", "shapes@1", "stage=prod", "lang=en", "--why", "looks good")
    assert tagged.startswith("shapes@1 has the tags lang=en, stage=prod\n")
    rows = noria("models", "list", "--tag", "stage=prod", "--tag", "lang=en").splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [["shapes@1", "lang=en,", "stage=prod"]]
    assert noria("models", "list", "--tag", "stage=test") == "no versions with these tags\n"
    assert "version      shapes@1\n" in noria("models", "show", "shapes@stage=prod")
    assert "shapes@2 has no tag 'stage=prod'. It has none." in noria(
        "models", "tag", "shapes", "stage=prod", "--delete", status=2
    )
    assert noria("models", "tag", "shapes@1", "stage=prod", "--delete").startswith("shapes@1 has the tags lang=en\n")
    assert noria("registry", "check") == "ok\n"


def test_check_reads_the_files_of_models(noria, bundled_folder, tmp_path):
    shutil.copytree(bundled_folder, tmp_path / "model")
    noria("models", "add", "shapes", str(tmp_path / "model"))
    assert noria("registry", "check") == "ok\n"
    (tmp_path / "model" / "unet" / "config.json").write_text("{}")
    (tmp_path / "model" / "vae" / "more.json").write_text("{}")
    url = (tmp_path / "model").as_uri()
    changed = f"shapes@1: in {url} unet/config.json, vae/more.json changed since it was added.\n"
    assert noria("registry", "check", status=1) == changed
    assert noria("registry", "check", "--no-files") == "ok\n"
    noria("models", "add", "shapes", "bundled")  # the same content in another place
    assert noria("registry", "check") == "ok\n"


def test_a_backup_is_restored_into_another_registry(noria, tmp_path):
    noria("models", "add", "shapes", "bundled")
    written = json.loads(noria("registry", "backup", str(tmp_path / "backup"), "--json"))
    other = ("--registry-database", f"sqlite:///{tmp_path}/restored.sqlite")
    sentence = noria("registry", "restore", str(tmp_path / "backup"), *other)
    assert sentence == f"restored {written['num_rows']} rows from {tmp_path / 'backup'}\n"
    assert "shapes@1" in noria("models", "list", *other)


SCENES = "sha256:2e155d176a5e876e07198b40a21299ba09d81283fe6c34cc5f7c6c41ec5968d1"


def test_an_image_of_the_bundled_model_leads_to_the_data_that_its_training_saw(noria, tmp_path):
    spec = open_model("bundled")
    metadata = GenerationMetadata(
        "a red circle",
        model=spec.name,
        model_version=spec.fingerprint,
        noria="0.1.0",
        loras=(Lora("outline", 0.8, "0123456789ab"),),
        image_digest="ba9876543210",
        controls=(Control("edges", 0.5, digest="aaaabbbbcccc"),),
        reference_images=(Reference(72, 64, "ddddeeeeffff"),),
        refiner=Refinement(0.7, "sharp", "111122223333"),
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png", **save_options(metadata, "png"))
    image = str(tmp_path / "image.png")
    assert "noria models add noria-shapes bundled" in noria("trace", image, status=2)
    noria("models", "add", "noria-shapes", "bundled")
    digest = json.loads(noria("models", "list", "--json"))["digest"]
    lines = noria("trace", image).splitlines()
    assert lines[0] == f"model noria-shapes@1  {digest}"
    assert lines[1].startswith("└─ made by: run demo_model/noria-shapes  complete, 2026-11-21 02:37 UTC")
    assert sum("step: run demo_model/train" in line for line in lines) == 5
    assert any(line.endswith(f"input: dataset demo_model scenes  {SCENES}") for line in lines)
    parts = ["LoRA outline  0123456789ab, weight 0.8", "ControlNet edges  aaaabbbbcccc, scale 0.5"]
    parts += ["start image  ba9876543210", "reference image  ddddeeeeffff", "refiner sharp  111122223333, from 0.7"]
    assert lines[-5:] == parts
    assert noria("trace", "noria-shapes") == "\n".join(lines[:-5]) + "\n"
    assert f"output: model noria-shapes@1  {digest}" in noria("trace", SCENES[:20], "--down")
    graph = json.loads(noria("trace", digest, "--json"))
    assert (graph["nodes"][0], graph["direction"]) == (
        {"type": "model", "id": f"model:{digest}", "names": ["noria-shapes@1"], "digest": digest},
        "up",
    )


def test_names_that_would_change_the_terminal_are_printed_without_what_does(noria):
    name = "/data/\u202e\x9b31mscenes"
    noria("models", "add", "shapes", "bundled", "--dataset", f"s3://bucket{name}@1")
    for command in (("trace", "shapes"), ("trace", "shapes", "--json"), ("trace", "shapes", "--openlineage")):
        printed = noria(*command)
        assert "\\u202e\\" in printed and not re.search("[\u202e\x9b]", printed)
    assert {"data/\u202e\x9b31mscenes"} <= {
        each["name"] for line in printed.splitlines() for each in json.loads(line)["inputs"]
    }
    card = noria("models", "card", "shapes")
    assert "data/  31mscenes" in card and not re.search("[\u202e\x9b]", card)


def test_a_trace_that_is_cut_is_said_where_what_is_printed_does_not_say_so(noria, monkeypatch, capsys):
    noria("models", "add", "shapes", "bundled")
    for command in (("trace", "shapes", "--openlineage"), ("models", "card", "shapes")):
        noria(*command)
        assert not noria.errors
    few = functools.partial(noria_trace.trace, max_nodes=3)
    monkeypatch.setattr(noria_trace, "trace", few)
    for command in (("trace", "shapes", "--openlineage"), ("models", "card", "shapes")):
        noria(*command)
        assert noria.errors == "the trace is cut: only 3 runs, models and data are in it, and there are more\n"


def test_what_cannot_be_traced_is_one_line(noria, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    for what, words in {
        str(tmp_path / "plain.png"): "no generation metadata",
        "shapes": "there is no model 'shapes'",
        "sha256:00000000": "no model and no data with the digest",
        "01a2028d-9625-77a9-a141-efbbcc3a6ef9": "has no run",
        "s3://bucket/scenes@7": "no such dataset",
        "s3://bucket/scenes": "has no version",
        "deployment:7": "no deployment 7",
        "table:7": "allowed are endpoint:NAME",
    }.items():
        printed = noria("trace", what, status=2)
        assert words.lower() in printed.lower() and printed.count("\n") == 1
