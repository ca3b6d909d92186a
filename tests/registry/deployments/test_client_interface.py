"""Rules that clients of an endpoint rely on: which versions may join it, and what is said of those that may not."""

import msgspec
import pytest

from noria.errors import RegistryError
from noria.models.catalog import open_model
from noria.protocol.kinds import AnyModelSpec
from noria.registry.deployments.client_interface import MAY_CHANGE, WIDENS, check_fits, interface_changes

IMAGES = msgspec.structs.replace(
    open_model("bundled"), min_side_px=64, max_side_px=128, multiple_px=16, max_references=2, needs_mask=False
)
MASKED = msgspec.structs.replace(IMAGES, needs_mask=True)
EMBEDDING = msgspec.structs.replace(open_model("minilm"), prompts=(("query", "q: "), ("passage", "p: ")))
CLASSES = msgspec.structs.replace(
    EMBEDDING, task="classification", pooling=(), dimensions=2, labels=("bad", "good"), activation="softmax", prompts=()
)


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (EMBEDDING, {"fingerprint": "other", "folder": "/other", "num_parameters": 9, "architecture": "RobertaModel"}),
        (EMBEDDING, {"max_length": 8192}),
        (EMBEDDING, {"pooling": ("cls",), "default_prompt": "query", "matryoshka_dimensions": (64, 128)}),
        (EMBEDDING, {"truncation_side": "left", "unread_keys": ('trained_by ("us")',)}),
        (EMBEDDING, {"prompts": (("passage", "other: "), ("query", "q: "), ("title", "t: "))}),
        (CLASSES, {"problem_type": "single_label_classification"}),
        (IMAGES, {"default_scheduler": "euler", "default_steps": 9, "default_guidance": 1.0, "default_strength": 0.5}),
        (IMAGES, {"min_side_px": 32, "max_side_px": 256, "multiple_px": 8, "max_references": 3}),
        (IMAGES, {"schedulers": (*IMAGES.schedulers, "new")}),
        (MASKED, {"needs_mask": False}),
    ],
)
def test_what_no_client_notices_may_change(before: AnyModelSpec, changes: dict) -> None:
    assert interface_changes(before, msgspec.structs.replace(before, **changes)) == []


@pytest.mark.parametrize(
    ("before", "changes", "words"),
    [
        (EMBEDDING, {"dimensions": 48}, "dimensions 48 instead of 384"),
        (EMBEDDING, {"dimensions": 768}, "dimensions 768 instead of 384"),
        (EMBEDDING, {"task": "reranking"}, "task 'reranking' instead of 'embedding'"),
        (EMBEDDING, {"normalize": False}, "normalize false instead of true"),
        (EMBEDDING, {"similarity": "dot"}, "similarity 'dot' instead of 'cosine'"),
        (EMBEDDING, {"vocab_size": 9}, "vocab_size 9 instead of 30522"),
        (EMBEDDING, {"max_length": 128}, "max_length 128 instead of 256"),
        (EMBEDDING, {"inputs": ("input_ids", "attention_mask")}, "inputs without 'token_type_ids'"),
        (EMBEDDING, {"prompts": (("query", "q: "),)}, "prompts without 'passage'"),
        (CLASSES, {"labels": ("good", "bad")}, "labels ['good', 'bad'] instead of ['bad', 'good']"),
        (CLASSES, {"labels": ("bad", "fine")}, "labels ['bad', 'fine'] instead of"),
        (CLASSES, {"activation": "sigmoid"}, "activation 'sigmoid' instead of 'softmax'"),
        (CLASSES, {"problem_type": "regression"}, "problem_type 'regression' instead of 'classification'"),
        (IMAGES, {"default_width_px": 64}, "default_width_px 64 instead of 128"),
        (IMAGES, {"default_height_px": 32}, "default_height_px 32 instead of 128"),
        (IMAGES, {"min_side_px": 80}, "min_side_px 80 instead of 64"),
        (IMAGES, {"max_side_px": 96}, "max_side_px 96 instead of 128"),
        (IMAGES, {"multiple_px": 24}, "multiple_px 24 instead of 16"),
        (IMAGES, {"schedulers": IMAGES.schedulers[1:]}, "schedulers without 'ddim'"),
        (IMAGES, {"max_references": 1}, "max_references 1 instead of 2"),
        (IMAGES, {"takes_loras": False}, "takes_loras false instead of true"),
        (IMAGES, {"takes_start_images": False}, "takes_start_images false instead of true"),
        (IMAGES, {"needs_mask": True}, "needs_mask true instead of false"),
    ],
)
def test_what_clients_notice_is_named(before: AnyModelSpec, changes: dict, words: str) -> None:
    (change,) = interface_changes(before, msgspec.structs.replace(before, **changes))
    assert change.startswith(words)


def test_both_sides_are_described() -> None:
    reranker = msgspec.structs.replace(CLASSES, task="reranking", dimensions=1, labels=("LABEL_0",), name="emb")
    with pytest.raises(RegistryError) as caught:
        check_fits("rr@1", reranker, EMBEDDING)
    assert caught.value.message.startswith(
        "rr@1 is of kind encoder (task reranking, 1 number for each text), and emb is served by one of kind encoder "
        "(task embedding, 384 numbers for each text); clients of emb would notice: task 'reranking'"
    )
    assert caught.value.message.endswith("Deploy it to another endpoint.")
    with pytest.raises(RegistryError, match="kind encoder instead of diffusion"):
        check_fits("rr@1", reranker, IMAGES)


def test_the_tables_name_properties_of_specs() -> None:
    assert {*IMAGES.__struct_fields__, *EMBEDDING.__struct_fields__} >= MAY_CHANGE | WIDENS.keys()
    assert not MAY_CHANGE & WIDENS.keys()
