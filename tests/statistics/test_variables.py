"""Variables that are counted, and where; and declarations that are rejected."""

import math

import pytest

from noria.config import StatisticsConfig, VariableConfig
from noria.errors import ConfigError
from noria.statistics.variables import BUILT_IN, Declarations, Variable, code_variables


def declare(*variables: VariableConfig, **settings) -> Declarations:
    return Declarations(StatisticsConfig(variables=variables, **settings))


def test_nothing_is_counted_by_default():
    assert declare().sampling_at("t2i") == {}


def test_groups_are_counted_at_all_endpoints_with_the_sampling():
    declared = declare(builtin=("images",), sampling=0.25)
    assert declared.sampling_at("any/model") == dict.fromkeys(
        ["image_brightness", "image_contrast", "image_entropy", "image_safety_score"], 0.25
    )
    assert declare(builtin=("images",), sampling=0.0).sampling_at("t2i") == {}


def test_the_first_pattern_that_fits_an_endpoint_holds():
    declared = declare(
        VariableConfig("price", "shop-*", "scalar", (1.0, 2.0), 0.5),
        VariableConfig("price", "*", "scalar", (1.0, 2.0)),
        VariableConfig("image_entropy", "sd-?", sampling=0.0),
        builtin=("images",),
    )
    assert declared.sampling_at("shop-a")["price"] == 0.5
    assert declared.sampling_at("other")["price"] == 1.0
    assert "image_entropy" not in declared.sampling_at("sd-1")
    assert "image_entropy" in declared.sampling_at("sd-15")


def test_a_built_in_variable_may_have_other_edges_and_then_has_them_everywhere():
    declared = declare(VariableConfig("prompt_chars", "t2i", edges=(5.0, 50.0)), builtin=("prompts",))
    assert declared.variables["prompt_chars"].edges == (5.0, 50.0)
    assert set(declared.sampling_at("other")) == {variable.name for variable in BUILT_IN["prompts"]}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ([VariableConfig("a", kind="scalar", edges=(2.0, 1.0))], "edges are one or more finite numbers, each above"),
        ([VariableConfig("a", kind="scalar", edges=(1.0, math.nan))], "finite numbers"),
        ([VariableConfig("a", kind="scalar", edges=(math.inf,))], "finite numbers"),
        ([VariableConfig("a", kind="scalar")], "edges are one or more"),
        ([VariableConfig("a", kind="category", edges=(1.0,))], "a is a category and has edges"),
        ([VariableConfig("a")], "'a' has no kind, and is no built-in variable"),
        ([VariableConfig("prompt_char")], "Did you mean 'prompt_chars'"),
        ([VariableConfig("scheduler", kind="scalar", edges=(1.0,))], "it is built in, as a category"),
        ([VariableConfig("a_total", kind="counter")], "does not end with _total"),
        ([VariableConfig("a", kind="counter", sampling=0.5)], "a counter counts every request"),
        (
            [VariableConfig("a", "x", "scalar", (1.0,)), VariableConfig("a", "y", "scalar", (2.0,))],
            r"a is declared as scalar with the edges \[1.0\] and as scalar with the edges \[2.0\]",
        ),
    ],
)
def test_a_declaration_that_is_not_allowed_is_named(variables, says):
    with pytest.raises(ConfigError, match=says):
        declare(*variables)


@pytest.mark.parametrize("name", ["", "1a", "a-b", 'a"} 1\nb{x="', "ä", "a" * 65, "x_bucket"])
def test_names_that_no_metric_may_have_are_rejected(name):
    with pytest.raises(ValueError, match="is not allowed; a name is"):
        Variable(name, "category")


def test_a_class_declares_kinds_by_edges_or_words():
    declared = code_variables({"a": (1, 2.5), "b": "category", "c": "value", "d": "counter"})
    assert [(each.kind, each.edges) for each in declared.values()] == [
        ("scalar", (1.0, 2.5)),
        ("category", ()),
        ("value", ()),
        ("counter", ()),
    ]
    with pytest.raises(ValueError, match="allowed are edges"):
        code_variables({"a": "words"})
    with pytest.raises(ValueError, match="built-in variable; give yours another name"):
        code_variables({"prompt_chars": (1, 2)})
