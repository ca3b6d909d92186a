"""What the suite's options may be."""

import pytest

from noria_bench.benches.suite_options import SuiteOptions, read_duration, read_load, read_rate


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "", "90000", "٣"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="1 to 86400 whole seconds"):
        read_duration(text)


@pytest.mark.parametrize("text", ["0", "80%", "1001", "all"])
def test_what_is_no_load_is_refused(text):
    with pytest.raises(ValueError, match="whole per cent"):
        read_load(text)


@pytest.mark.parametrize("text", ["0", "nan", "-3", "inf", "much"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match=r"0\.1 to 1000000 rows a second"):
        read_rate(text)


def test_a_duration_wins_over_the_article_s_15_minutes():
    assert SuiteOptions().duration_s(90.0) == 90.0
    assert SuiteOptions(full=True).duration_s(90.0) == 900.0
    assert SuiteOptions(seconds=45.0, full=True).duration_s(90.0) == 45.0
