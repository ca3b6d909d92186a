"""Values that user code returns become JSON, or an error that says where they cannot."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from noria.frontend.user_code.values import EncodeBody, RecordedValues, body_as, to_json
from noria.statistics.variables import Variable

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (NAN, "the response is nan"),
        ({"a": {"b": [1, INF]}}, r"a.b\[1\] is inf"),
        ({"a": (None, -INF)}, r"a\[1\] is -inf"),
        (np.array([[1, np.nan]]), r"\[0\]\[1\] is nan"),
        ({"a": np.float32("inf")}, "a is inf"),
        ([{"null": {"x": NAN}}], r"\[0\].null.x is nan"),
    ],
)
def test_numbers_that_are_not_finite_are_named(returned: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}, which is no number in JSON$"):
        to_json(returned)


@pytest.mark.parametrize("returned", [None, {"a": None}, "null", ["null", 1.5, None], {"null": [np.float32(2)]}])
def test_what_only_looks_like_such_a_number_is_returned(returned: Any) -> None:
    assert msgspec.json.decode(to_json(returned)) == (returned if returned != {"null": [2]} else {"null": [2.0]})


def test_a_body_for_another_model_cannot_have_them_either() -> None:
    """Null in their place would be the field's default."""
    with pytest.raises(ValueError, match="dimensions is nan"):
        body_as(EncodeBody, {"inputs": "a", "dimensions": NAN})


def test_values_are_recorded_that_their_variables_allow_and_that_are_wanted() -> None:
    scores, hits, tags = (
        Variable("score", "scalar", (0.0, 1.0)),
        Variable("hits", "counter"),
        Variable("tag", "category"),
    )
    recorded = RecordedValues({"score": scores, "hits": hits, "tag": tags}, {"score": scores, "hits": hits})
    recorded.add("score", -1)
    recorded.add("hits", 0)
    recorded.add("tag", "unwanted")
    assert recorded.values == [("score", -1.0), ("hits", 0.0)]
    with pytest.raises(ValueError, match="no statistic 'x' here; there are score, hits, tag"):
        recorded.add("x", 1)
    with pytest.raises(ValueError, match="is a counter and got -1"):
        recorded.add("hits", -1)
    for _ in range(254):
        recorded.add("hits", 1)
    with pytest.raises(ValueError, match="at most 256 values"):
        recorded.add("hits", 1)
    assert len(recorded.values) == 256
