"""Real processes and small encoders of each task, compared with transformers and sentence-transformers.

One server has images and texts, another one all tasks of models with labels.
"""

import base64
import concurrent.futures
import io
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from encoders import TEXTS, make_encoder, make_tower, sentence_transformer
from noria.testing.server import RunningServer, running_server
from waiting import wait_until

pytestmark = pytest.mark.slow  # exports an encoder of each task, and starts two servers


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_encoder(tmp_path_factory.mktemp("small"), **sentence_transformer())


@pytest.fixture(scope="module")
def server(encoder: pathlib.Path) -> Iterator[RunningServer]:
    arguments = ["bundled", "--slots", "2", "--threads", "1", "--additional-models", str(encoder)]
    with running_server([*arguments, "--restart-wait-s", "280"]) as running:
        with httpx.Client(base_url=f"http://127.0.0.1:{running.port}") as web:
            wait_until(lambda: all(each["state"] == "ready" for each in web.get("/readyz").json()["engines"]))
        yield running


def embed(server: RunningServer, texts: list[str]) -> np.ndarray:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="noria", input=texts)
        return np.array([each.embedding for each in answer.data], np.float32)


def test_embeddings_equal_sentence_transformers_alone_and_together(
    server: RunningServer, encoder: pathlib.Path
) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [text for text in TEXTS if text] * 8
    expected = SentenceTransformer(str(encoder), device="cpu").encode(texts)
    np.testing.assert_allclose(embed(server, texts), expected, atol=1e-5)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        alone = np.concatenate(list(pool.map(lambda text: embed(server, [text]), texts)))
    np.testing.assert_allclose(alone, expected, atol=1e-5)


def test_images_come_from_the_same_port(server: RunningServer) -> None:
    body = {"prompt": "a red circle", "inference_steps": 2}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as web:
        assert web.post("/t2i", json=body).headers["content-type"] == "image/png"
        kinds = [each["noria"]["kind"] for each in web.get("/v1/models").json()["data"]]
    assert sorted(kinds) == ["diffusion", "encoder"]


def num_batches(web: httpx.Client) -> float:
    """The batches that engines have computed: the load that a front end knows misses what takes half a second."""
    lines = web.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("noria_text_batches_total{"))


def test_texts_whose_engine_is_killed_are_encoded_by_its_next_process(server: RunningServer) -> None:
    texts = ["words " * 60] * 2000
    expected = embed(server, texts)
    with (
        concurrent.futures.ThreadPoolExecutor(4) as pool,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as web,
    ):
        before = num_batches(web)
        futures = [pool.submit(embed, server, texts) for _ in range(4)]
        wait_until(lambda: num_batches(web) > before + 10)  # more than what the first request may have left to count
        for engine in server.children("engine"):
            engine.kill()
        assert not all(future.done() for future in futures)
        for future in futures:
            np.testing.assert_allclose(future.result(), expected, atol=1e-5)


LABELS = {
    "moods": ("BertForSequenceClassification", ["bad", "neutral", "good"]),
    "ranker": ("BertForSequenceClassification", ["LABEL_0"]),
    "names": ("BertForTokenClassification", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]),
}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Folders of models with labels, by name."""
    folder = tmp_path_factory.mktemp("labelled")
    return {
        name: make_encoder(
            folder / name,
            architecture,
            {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}},
        )
        for name, (architecture, labels) in LABELS.items()
    }


@pytest.fixture(scope="module")
def labels_server(labelled: dict[str, pathlib.Path]) -> Iterator[RunningServer]:
    """A server with all of them."""
    first, *others = map(str, labelled.values())
    with running_server([first, "--additional-models", ",".join(others), "--threads", "1"]) as running:
        yield running


@pytest.fixture
def labels_web(labels_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{labels_server.port}", timeout=60) as web:
        yield web


def pipeline(task: str, folder: pathlib.Path, **options: Any) -> Any:
    """transformers' own, by the same tokenizer.json."""
    import transformers

    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    # With the types of tokens, by which a model tells the texts of a pair apart.
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_input_names=inputs, **special
    )
    architecture = getattr(transformers, LABELS[folder.name][0])
    return transformers.pipeline(task, architecture.from_pretrained(folder), tokenizer=tokenizer, **options)


SHORT = [text for text in TEXTS if text and len(text) < 100]


def test_scores_labels_and_ranks_equal_transformers(
    labels_web: httpx.Client, labelled: dict[str, pathlib.Path]
) -> None:
    expected = pipeline("text-classification", labelled["moods"], top_k=None)(SHORT)
    got = labels_web.post("/predict", json={"inputs": [[text] for text in SHORT]}).json()
    for one, other in zip(got, expected, strict=True):
        assert [each["label"] for each in one] == [each["label"] for each in other]
        assert [each["score"] for each in one] == pytest.approx([each["score"] for each in other], abs=1e-5)
    pairs = [{"text": "what is red?", "text_pair": text} for text in SHORT]
    scores = [each["score"] for each in pipeline("text-classification", labelled["ranker"])(pairs)]
    ranked = labels_web.post("/rerank", json={"query": "what is red?", "texts": SHORT}).json()
    assert [each["score"] for each in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert [scores[each["index"]] for each in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)


@pytest.mark.parametrize("strategy", ["none", "simple"])
def test_entities_equal_transformers(
    labels_web: httpx.Client, labelled: dict[str, pathlib.Path], strategy: str
) -> None:
    expected = pipeline("token-classification", labelled["names"], aggregation_strategy=strategy)(SHORT)
    parameters = {"aggregation_strategy": strategy}
    got = labels_web.post("/", json={"inputs": SHORT, "parameters": parameters, "model": "names"}).json()
    assert sum(map(len, got)) > len(SHORT)
    for text, one, other in zip(SHORT, got, expected, strict=True):
        field = "entity" if strategy == "none" else "entity_group"
        assert [(each[field], each["start"], each["end"]) for each in one] == [
            (each[field], each["start"], each["end"]) for each in other
        ]
        assert [each["score"] for each in one] == pytest.approx([each["score"] for each in other], abs=1e-5)
        assert all(each["word"] == text[each["start"] : each["end"]] for each in one)


def test_images_and_texts_of_clip_equal_transformers(tmp_path: pathlib.Path) -> None:
    import torch
    import transformers

    make_tower(tmp_path / "clip", "CLIPModel")
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size=32)
    processor.save_pretrained(tmp_path / "clip")
    image, file = Image.radial_gradient("L").convert("RGB").resize((60, 40)), io.BytesIO()
    image.save(file, "png")
    model = transformers.CLIPModel.from_pretrained(tmp_path / "clip")
    with torch.inference_mode():
        (expected,) = model.get_image_features(**processor(image, return_tensors="pt")).pooler_output.numpy()
    inputs = ["a red circle", {"image": base64.b64encode(file.getvalue()).decode()}]
    with (
        running_server([str(tmp_path / "clip"), "--threads", "1"]) as running,
        httpx.Client(base_url=f"http://127.0.0.1:{running.port}", timeout=120) as web,
    ):
        rows = [web.post("/v1/embeddings", json={"input": each}).json()["data"] for each in (inputs, inputs[1:])]
    assert rows[0][0]["embedding"] != rows[0][1]["embedding"]
    np.testing.assert_allclose([rows[0][1]["embedding"], rows[1][0]["embedding"]], [expected] * 2, atol=1e-5)
