"""The meaning of logits."""

import pytest

from noria.frontend.services.texts.scores import (
    Entity,
    Prediction,
    Rank,
    entities,
    predictions,
    ranks,
    scores,
    sigmoid,
    similarities,
)


def test_scores_of_any_logits_are_those_of_their_function():
    assert scores([0.0, 0.0], "softmax") == [0.5, 0.5]
    assert scores([1000.0, -1000.0], "softmax") == [1.0, 0.0]
    assert scores([2.0, -1.0], "identity") == [2.0, -1.0]
    assert scores([0.0, 1000.0, -1000.0], "sigmoid") == [0.5, 1.0, 0.0]
    assert sigmoid(1.0) == pytest.approx(0.731, abs=1e-3)
    assert sigmoid(1.0) + sigmoid(-1.0) == pytest.approx(1.0)


def test_labels_and_texts_are_in_order_the_best_first_and_of_equals_the_first():
    best = [Prediction(3.0, "a"), Prediction(2.0, "z"), Prediction(2.0, "b"), Prediction(1.0, "y")]
    assert predictions([1.0, 2.0, 3.0, 2.0], ["y", "z", "a", "b"], "identity") == best
    assert predictions([1.0, 2.0, 3.0, 2.0], ["y", "z", "a", "b"], "identity", top_k=2) == best[:2]
    assert ranks([90.0, 95.0, 90.0], "sigmoid", ["a", "b", "c"]) == [
        Rank(1, 1.0, "b"),
        Rank(0, 1.0, "a"),
        Rank(2, 1.0, "c"),
    ]
    assert ranks([0.0], "sigmoid") == [Rank(0, 0.5)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", [1.0, 0.6, 0.0]),
        ("dot", [50.0, 30.0, 0.0]),
        ("euclidean", [-5.0, -(65**0.5), -5.0]),
        ("manhattan", [-7.0, -11.0, -7.0]),
    ],
)
def test_similarities_are_those_of_sentence_transformers(kind, expected):
    assert similarities(kind, [3.0, 4.0], [[6.0, 8.0], [10.0, 0.0], [0.0, 0.0]]) == pytest.approx(expected)


def test_neighbouring_tokens_of_one_label_are_an_entity_until_the_next_begins():
    labels, text = ["O", "B-PER", "I-PER", "MISC"], "Ann Lee met Bo Rome"
    spans = [(0, 3), (4, 7), (8, 11), (12, 14), (15, 19)]
    chosen = [1, 2, 0, 1, 3]
    tokens = [
        (span, [100.0 * (number == label) for number in range(4)]) for span, label in zip(spans, chosen, strict=True)
    ]
    assert entities(text, tokens, labels) == [
        Entity(1.0, "Ann Lee", 0, 7, entity_group="PER"),
        Entity(1.0, "Bo", 12, 14, entity_group="PER"),
        Entity(1.0, "Rome", 15, 19, entity_group="MISC"),
    ]
    single = entities(text, tokens, labels, "none")
    assert [(each.word, each.entity) for each in single] == [
        ("Ann", "B-PER"),
        ("Lee", "I-PER"),
        ("Bo", "B-PER"),
        ("Rome", "MISC"),
    ]
    assert [each.word for each in entities(text, [*tokens[:1], *tokens[3:4]], labels, ignored=())] == ["Ann", "Bo"]
    uncertain = [((0, 3), [0.0, 0.0, -100.0, -100.0]), ((4, 7), [100.0, 0.0, 0.0, 0.0])]
    (entity,) = entities(text, uncertain, labels, ignored=())
    assert (entity.word, entity.score) == ("Ann Lee", pytest.approx(0.75))
