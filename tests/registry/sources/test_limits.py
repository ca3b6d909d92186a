"""The sources that may be read over HTTP."""

import pytest

from noria.errors import ModelError
from noria.registry.sources.limits import SourceLimits
from noria.registry.sources.source import parse_source


@pytest.mark.parametrize(
    "source",
    [
        "{home}/secret",
        "file://{home}/secret",
        "{home}/allowed/../secret",
        "{home}/allowed/link",
        "{home}/nothing",  # as if it were there
        "secret",
        "~root",
        "webhdfs://169.254.169.254/latest",
    ],
)
def test_folders_that_are_not_below_a_root_may_not_be_read(tmp_path, source):
    for name in ("allowed", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="may not be read over HTTP"):
        SourceLimits((str(tmp_path / "allowed"),), 1.0).check(parse_source(source.replace("{home}", str(tmp_path)), {}))


LIMITS = SourceLimits(("s3://bucket/models/", "/srv"), 1.0)


@pytest.mark.parametrize("url", ["s3://bucket/models", "s3://bucket/models/", "s3://bucket/models/a-b/v1.2"])
def test_urls_below_a_root_are_read(url):
    assert LIMITS.check(parse_source(url, {})) == parse_source(url, {})


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/models2",
        "s3://bucket/other",
        "s3://bucket",
        "s3://bucket/models/../other",
        "s3://bucket/models/./a",
        "s3://bucket/models//a",
        "s3://bucket/models/%2e%2e/other",
        "s3://bucket/models/*",
        "s3://bucket@evil/models/a",
        "S3://bucket/models",
        "gs://bucket/models",
    ],
)
def test_urls_that_only_look_like_it_are_not(url):
    with pytest.raises(ModelError, match="may not be read over HTTP"):
        LIMITS.check(parse_source(url, {}))


def test_a_model_that_is_too_large_is_not_copied():
    LIMITS.check_size("s3://bucket/models/a", 2**30)
    with pytest.raises(ModelError, match=r"allows 1 GiB"):
        LIMITS.check_size("s3://bucket/models/a", 2**30 + 1)
