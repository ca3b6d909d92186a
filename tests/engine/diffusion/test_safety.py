"""The check of generated images by a classifier: scores as transformers', and nothing of a refused image gets out."""

import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
import transformers

from generating import difference, generate
from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.engine.diffusion.results import DecodedImage
from noria.engine.diffusion.sizing.weight_bytes import weights_of, weights_to_load
from noria.engine.diffusion.warmup.calibration import cost_key
from noria.engine.loop import PreviewReady, ResultReady, StepLoop
from noria.errors import ModelError
from noria.models.adapters.safety_folders import SafetyFolders
from noria.models.catalog import open_model
from noria.models.diffusion.safety_classifier import load_safety_check
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request
from safety_classifiers import save_classifier

# In Pillow, by which transformers prepares images on a CPU, up to a fifth of the numbers are rounded to the next level.
SCORE_TOLERANCE = 0.005
PROCESSORS = {
    "ViT": {"size": {"height": 32, "width": 32}},
    "CLIP": {"size": {"shortest_edge": 32}, "crop_size": 32},
    "ConvNext": {"size": {"shortest_edge": 32}},
    "Siglip": {"size": {"height": 32, "width": 32}},
}


def expected_scores(folder, images, labels, *, is_multi_label=False):
    """The scores of transformers' own processor and model."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    inputs = processor([PIL.Image.fromarray(image) for image in images], return_tensors="pt")
    with torch.inference_mode():
        logits = model(**inputs).logits
    refused = [model.config.label2id[label] for label in labels]
    chances = logits.sigmoid() if is_multi_label else logits.softmax(1)
    return (chances[:, refused].amax(1) if is_multi_label else chances[:, refused].sum(1)).numpy()


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_scores_are_those_of_transformers(tmp_path, tiny_folder, processor, problem_type):
    labels = ("drawing", "nsfw", "gore")
    folder = save_classifier(tmp_path, labels, processor, PROCESSORS[processor], problem_type=problem_type)
    rule = SafetyFolders([str(folder)], labels[1:]).for_model(open_model(str(tiny_folder)))
    check = load_safety_check(rule, "cpu")
    for height, width in ((48, 64), (64, 40), (32, 32)):
        images = np.random.default_rng(height).integers(0, 256, (3, height, width, 3), np.uint8)
        images[2] //= 4
        with torch.inference_mode():
            found = check.scores(torch.from_numpy(images)).numpy()
        expected = expected_scores(folder, images, labels[1:], is_multi_label=problem_type is not None)
        np.testing.assert_allclose(found, expected, atol=SCORE_TOLERANCE)
        assert np.ptp(expected) > 4 * SCORE_TOLERANCE, "the images differ too little to show anything"


def test_a_processor_with_steps_of_its_own_is_refused(tmp_path, tiny_folder):
    settings = {"size": {"height": 32, "width": 32}, "do_center_crop": False, "include_top": True}
    folder = save_classifier(tmp_path, processor="EfficientNet", settings=settings | {"resample": 2})
    rule = SafetyFolders([str(folder)], ["nsfw"]).for_model(open_model(str(tiny_folder)))
    with pytest.raises(ModelError, match="EfficientNetImageProcessorPil does more than to resize"):
        load_safety_check(rule, "cpu")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "None"}')
    with pytest.raises(ModelError, match=r"preprocessor_config\.json: the image processor .* cannot be used"):
        load_safety_check(rule, "cpu")


def test_weights_of_another_classifier_are_refused(tmp_path, tiny_folder):
    folder = save_classifier(tmp_path, ("a", "b", "nsfw"))
    save_classifier(tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").rename(folder / "model.safetensors")
    rule = SafetyFolders([str(folder)], ["nsfw"]).for_model(open_model(str(tiny_folder)))
    with pytest.raises(ModelError, match="classifier"):
        load_safety_check(rule, "cpu")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("classifier") / "nsfw")


def load(folder, **settings):
    spec = open_model(str(folder))
    config = EngineConfig(dtype="float32", slots=8, threads=1, **settings)
    return spec, *load_executor(spec, config, "cpu")


REQUESTS = [
    make_image_request(f"r{k}", seed=40 + k, width=32 + 8 * k, height=32, n=3, guidance_scale=1.0 + k, partial_images=1)
    for k in range(2)
]


@pytest.mark.parametrize("settings", [{}, {"buckets": (4, 8)}])
def test_refused_images_have_no_pixels_and_others_are_as_without_the_classifier(tiny_folder, classifier, settings):
    plain = generate(load(tiny_folder, **settings)[1], REQUESTS)
    keys = sorted(plain)
    scores = dict(zip(keys, [expected_scores(classifier, [plain[key]], ["nsfw"])[0] for key in keys], strict=True))
    threshold = float(np.mean(sorted(scores.values())[2:4]))
    assert min(abs(score - threshold) for score in scores.values()) > SCORE_TOLERANCE, "choose other seeds"
    checked = {"safety_classifiers": (str(classifier),), "safety_threshold": threshold}
    _, executor, _ = load(tiny_folder, **settings, **checked)
    events = []
    loop = StepLoop(StepScheduler(8), executor, events.append, lambda: 0.0)
    for request in REQUESTS:
        loop.submit(executor.prepare(request))
    thumbnails = []
    loop._on_plan = lambda _: True  # a live view asks for thumbnails
    while (iteration := loop.run_iteration()) is not None:
        thumbnails += iteration.thumbnails
    results = [event for event in events if isinstance(event, ResultReady)]
    assert len(results) == len(keys)
    for event in results:
        assert isinstance(event.result, DecodedImage)
        key = event.prepared.request.request_id, event.index
        done, rgb = event.result.message()
        assert done.safety_score == pytest.approx(scores[key], abs=SCORE_TOLERANCE)
        assert done.is_refused == (scores[key] > threshold)
        if done.is_refused:
            assert rgb == b""
        else:
            found = np.frombuffer(rgb, np.uint8).reshape(plain[key].shape)
            assert difference(found, plain[key]) == 0
    assert not thumbnails and not any(isinstance(event, PreviewReady) for event in events)


def test_the_classifier_counts_as_memory_once_and_for_costs(tiny_folder, classifier):
    spec, executor, config = load(tiny_folder, safety_classifiers=(str(classifier),))
    parameters = transformers.AutoModelForImageClassification.from_pretrained(classifier).num_parameters()
    assert weights_of(spec, config).here["safety classifier"] == 4 * parameters
    assert "safety classifier" not in weights_to_load(spec, config, "cpu").here, "this process holds it"
    without = msgspec.structs.replace(config, safety_classifiers=())
    assert cost_key(spec, config, "") != cost_key(spec, without, "")
    del executor


def test_a_score_that_is_no_number_is_refused(tiny_folder, tmp_path):
    rule = SafetyFolders([str(save_classifier(tmp_path))], ["nsfw"]).for_model(open_model(str(tiny_folder)))
    check = load_safety_check(rule, "cpu")
    with torch.no_grad():
        check._classifier.classifier.bias[0] = torch.nan
    assert check.scores(torch.zeros((2, 32, 32, 3), dtype=torch.uint8)).tolist() == [1.0, 1.0]
