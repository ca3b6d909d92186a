"""Sources of models, as texts name them."""

import pytest

from noria.errors import ModelError, RegistryError
from noria.registry.sources.source import (
    FileSource,
    FilesystemSource,
    HubSource,
    LocalSource,
    MlflowSource,
    parse_source,
)

TRACKING = {"MLFLOW_TRACKING_URI": "https://mlflow.example/"}


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("bundled", LocalSource("bundled")),
        ("../models/a b", LocalSource("../models/a b")),
        ("file:///models/a%20b", LocalSource("/models/a b")),
        ("../models/a.safetensors", FileSource("../models/a.safetensors")),
        ("file:///models/a.safetensors", FileSource("/models/a.safetensors")),
        ("hf://org/shapes/a.safetensors@v1", FileSource("hf://org/shapes/a.safetensors@v1")),
        ("hf://org/shapes", HubSource("org/shapes", None)),
        ("hf://org/shapes@refs/pr/1", HubSource("org/shapes", "refs/pr/1")),
        ("mlflow:models:/shapes@prod", MlflowSource("https://mlflow.example", "shapes", None, "prod")),
        ("mlflow:models:/shapes/3", MlflowSource("https://mlflow.example", "shapes", "3", None)),
        ("s3://bucket/models/shapes", FilesystemSource("s3://bucket/models/shapes")),
    ],
)
def test_a_text_names_a_source(text, source):
    assert parse_source(text, TRACKING) == source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hf://shapes", "allowed is hf://OWNER/NAME"),
        ("hf://org/shapes@../other", "allowed is hf://OWNER/NAME"),
        ("hf:org/shapes", "allowed is hf://OWNER/NAME"),
        ("mlflow:models:/shapes", "allowed is mlflow:models:/NAME@ALIAS"),
        ("mlflow:models:/shapes/latest", "allowed is mlflow:models:/NAME@ALIAS"),
        ("file://host/models", "no folder of this machine"),
        ("https://host/models/shapes", "no source of models"),
        ("zip://shapes::s3://bucket/models.zip", "no source of models"),
        ("s3:bucket", "no source of models"),
    ],
)
def test_what_is_no_source_is_rejected_with_what_is_allowed(text, words):
    with pytest.raises(ModelError, match=words):
        parse_source(text, TRACKING)


@pytest.mark.parametrize("server", ["", "sqlite:///mlflow.db", "databricks"])
def test_mlflow_needs_a_server(server):
    with pytest.raises(ModelError, match=r"MLFLOW_TRACKING_URI is .*allowed is the URL of an MLflow server"):
        parse_source("mlflow:models:/shapes/3", {"MLFLOW_TRACKING_URI": server})


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("s3://user:hunter2@bucket/shapes", {}),
        ("s3://bucket/shapes?X-Amz-Signature=hunter2", {}),
        ("mlflow:models:/shapes/3", {"MLFLOW_TRACKING_URI": "https://user:hunter2@mlflow.example"}),
    ],
)
def test_a_source_with_a_secret_is_rejected_and_not_quoted(text, environment):
    with pytest.raises(RegistryError, match="Remove it") as raised:
        parse_source(text, environment)
    assert "hunter2" not in str(raised.value)
