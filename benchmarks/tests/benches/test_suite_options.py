"""The options of the benches that compare targets."""

import pytest

from noria_bench.benches.suite_options import SuiteOptions, read_duration, read_rate


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "", "90000", "٣"])
def test_an_invalid_duration_is_rejected(text):
    with pytest.raises(ValueError, match="1 to 86400 whole seconds"):
        read_duration(text)


@pytest.mark.parametrize("text", ["0", "nan", "-3", "inf", "much"])
def test_an_invalid_rate_is_rejected(text):
    with pytest.raises(ValueError, match=r"0\.1 to 1000000 rows per second"):
        read_rate(text)


def test_a_duration_overrides_the_article_s_15_minutes():
    assert SuiteOptions().duration_s(90.0) == 90.0
    assert SuiteOptions(full=True).duration_s(90.0) == 900.0
    assert SuiteOptions(seconds=45.0, full=True).duration_s(90.0) == 45.0
