"""The traffic split: sticky, nested, and of the right size."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.canary.traffic_split import TrafficSplit, key_position
from noria.errors import InvalidField

keys = st.text(max_size=20)
weights = st.floats(0, 1)


def split(weight, salt="deployment-1"):
    return TrafficSplit("3", "4", weight, salt)


@settings(max_examples=25)
@given(keys, weights, weights)
def test_no_key_goes_back_to_the_control_while_the_weight_grows(key, first, second):
    low, high = sorted((first, second))
    assert not (split(low).choose(key) == "canary" and split(high).choose(key) == "control")


@settings(max_examples=25)
@given(keys)
def test_a_weight_of_0_has_no_key_and_one_of_1_has_all(key):
    assert (split(0.0).choose(key), split(1.0).choose(key)) == ("control", "canary")


def test_the_last_key_of_all_is_the_canarys_at_weight_1(monkeypatch):
    monkeypatch.setattr("noria.canary.traffic_split.key_position", lambda *_: 2**64 - 1)
    assert (split(1.0).choose("k"), split(1 - 1e-16).choose("k")) == ("canary", "control")


def test_the_canary_has_its_share_of_the_keys_and_other_ones_with_another_salt():
    names = [f"user-{k}" for k in range(20_000)]
    first, second = ({name for name in names if split(0.1, salt).choose(name) == "canary"} for salt in ("a", "b"))
    # Six standard deviations of a binomial are 255; of those in both, 85.
    assert abs(len(first) - 2000) < 255 and abs(len(second) - 2000) < 255
    assert abs(len(first & second) - 200) < 85


def test_the_position_is_a_keyed_blake2b():
    assert key_position("salt", "k\ud800") == int.from_bytes(
        hashlib.blake2b(b"k\xed\xa0\x80", key=b"salt", digest_size=8).digest(), "big"
    )


def test_an_override_names_an_arm_or_a_version():
    names = ("canary", "4", "control", "3")
    assert [split(0.5).choose("k", name) for name in names] == ["canary", "canary", "control", "control"]
    with pytest.raises(InvalidField, match=r"'5' is not served here; allowed are control \(3\) and canary \(4\)"):
        split(0.5).choose("k", "5")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split(1.1), "1.1; a weight is 0 to 1"),
        (lambda: split(float("nan")), "nan; a weight"),
        (lambda: split(0.5, ""), "''; a salt has 1 to 64 bytes"),
        (lambda: split(0.5, "x" * 65), "a salt has 1 to 64 bytes"),
    ],
)
def test_impossible_values_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
