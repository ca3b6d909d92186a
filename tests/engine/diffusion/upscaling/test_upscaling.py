"""Pixels that are enlarged between two passes, or of an image that is sent, in the running batch: as by hand."""

import pickle

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from generating import (
    NATURAL_TOLERANCE,
    PARITY_TOLERANCE,
    assert_as_alone,
    difference,
    evicted_image,
    generate,
    load,
    moved_image,
)
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.upscaling import prepared_upscaling
from noria.errors import InvalidField, QueueFull
from noria.models.adapters.upscaler_folders import UpscalerFolders
from noria.models.diffusion.pixel_upscaler import PixelModel
from noria.protocol.diffusion import PixelUpscaler, SecondPass, Upscaling
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler
from start_images import start_pixels
from upscaler_files import esrgan_tensors, save_esrgan

spandrel = pytest.importorskip("spandrel")

NUM_FIRST, NUM_BETWEEN = 5, 3  # calls: the decode, a tile, the encode


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("upscalers")
    save_esrgan(path / "a.pth")
    save_esrgan(path / "b.safetensors", seed=1)
    return path


@pytest.fixture(scope="module")
def tiny(tiny_folder, folder):
    return load(tiny_folder, upscalers=(str(folder),))


def named(folder, name):
    return UpscalerFolders((str(folder),)).complete(name, "upscaler_1")


def two_passes(number, upscaler, **fields):
    second = upscaler and SecondPass(64, 48, inference_steps=6, strength=0.7, pixel_upscaler=upscaler)
    settings = {"prompt": ["a red circle", "a blue square"][number % 2], "guidance_scale": [1.0, 5.0][number % 2]}
    defaults = {"seed": 700 + number, "width": 32, "height": 24, "inference_steps": NUM_FIRST, "second_pass": second}
    return make_image_request(f"r{number}", **settings | defaults | fields)


def only_enlarged(number, upscaler, size_px, result_px):
    request = make_image_request(f"e{number}", width=size_px[0], height=size_px[1], guidance_scale=1.0)
    payload = msgspec.structs.replace(request.payload, upscaling=Upscaling(*result_px, upscaler))
    return msgspec.structs.replace(request, payload=payload), start_pixels(*size_px, seed=number)


def enlarged_by_hand(file_tensors, pixels, result_px):
    model = spandrel.ModelLoader("cpu").load_from_state_dict(file_tensors)
    with torch.inference_mode():
        larger = model(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255)[0].permute(1, 2, 0)
    image = Image.fromarray((larger.numpy() * 255).round().astype(np.uint8))
    return np.array(image.resize(result_px, Image.Resampling.LANCZOS))


def two_passes_by_hand(spec, request, enlarge):
    second = request.payload.second_pass
    of_text, of_image = (
        open_pipeline(each, spec.folder)
        for each in (diffusers.StableDiffusionPipeline, diffusers.StableDiffusionImg2ImgPipeline)
    )
    for pipe in (of_text, of_image):
        set_scheduler(pipe, request, clip_sample=False, steps_offset=1)
    larger = Image.fromarray(enlarge(run_pipeline(of_text, request)))
    own = {"strength": second.strength, "num_inference_steps": second.inference_steps, "width": None, "height": None}
    return run_pipeline(of_image, request, image=larger, **own)


@pytest.mark.parametrize("scheduler", ["ddim", "euler-a", "heun"])
def test_it_gives_the_images_of_decoding_enlarging_and_encoding_by_hand(tiny, folder, scheduler):
    def enlarge(pixels):
        return enlarged_by_hand(esrgan_tensors(), pixels, (64, 48))

    for number in range(2):
        request = two_passes(number, named(folder, "a"), scheduler=scheduler)
        ours = generate(tiny[1], [request])[request.request_id, 0]
        assert difference(ours, two_passes_by_hand(tiny[0], request, enlarge)) <= PARITY_TOLERANCE, request


@pytest.mark.parametrize(("name", "resampling"), [("Lanczos", 1), ("Nearest", 0)])
def test_filters_need_no_file(tiny, name, resampling):
    request = two_passes(1, PixelUpscaler(name))
    ours = generate(tiny[1], [request])["r1", 0]

    def enlarge(pixels):
        return np.asarray(Image.fromarray(pixels).resize((64, 48), Image.Resampling(resampling)))

    assert difference(ours, two_passes_by_hand(tiny[0], request, enlarge)) <= PARITY_TOLERANCE


def test_a_batch_of_all_kinds_has_the_images_of_each_alone(tiny, folder):
    a, b = named(folder, "a"), named(folder, "b")
    requests = [
        two_passes(0, a, scheduler="euler-a", n=2),
        two_passes(1, b),
        two_passes(2, None, width=64, height=48),
        two_passes(3, a, scheduler="heun"),
    ]
    frames = {}
    for number, (upscaler, size_px) in enumerate([(a, (300, 280)), (a, (40, 300)), (b, (5, 4))]):
        request, pixels = only_enlarged(number, upscaler, size_px, (size_px[0] * 3, size_px[1] * 3))
        requests.append(request)
        frames[request.request_id] = memoryview(pixels.tobytes())
    assert_as_alone(tiny[1], requests, [(5 * k) % 7 for k in range(len(requests))], frames)


@pytest.mark.parametrize("size_px", [(300, 280), (600, 31), (7, 5)])
def test_tiles_have_no_seams(tiny, folder, size_px):
    """By tiles an image is as it is at once."""
    result_px = size_px[0] * 4, size_px[1] * 4
    request, pixels = only_enlarged(1, named(folder, "b"), size_px, result_px)
    ours = generate(tiny[1], [request], frames={"e1": memoryview(pixels.tobytes())})["e1", 0]
    assert difference(ours, enlarged_by_hand(esrgan_tensors(1), pixels, result_px)) <= 1


def test_an_upscaler_is_repeated_until_the_result_fits(tiny, folder):
    request, pixels = only_enlarged(1, named(folder, "a"), (20, 12), (120, 72))
    once = enlarged_by_hand(esrgan_tensors(), pixels, (80, 48))
    ours = generate(tiny[1], [request], frames={"e1": memoryview(pixels.tobytes())})["e1", 0]
    assert difference(ours, enlarged_by_hand(esrgan_tensors(), once, (120, 72))) <= 2


def test_calls_of_others_are_between_the_tiles(tiny, folder):
    request, pixels = only_enlarged(1, named(folder, "a"), (600, 300), (1200, 600))
    prepared = tiny[1].prepare(request, memoryview(pixels.tobytes()))
    assert prepared.num_calls == 3 * 2  # tiles of 256
    assert prepared.batch_key != two_passes(1, None).payload
    others = tiny[1].prepare(two_passes(1, named(folder, "a")))
    assert [num for _, num in others.between] == [1, 1, 1]
    assert others.between[1][0] == prepared.batch_key  # tiles of images of all sizes share calls


@pytest.mark.parametrize("call", [NUM_FIRST, NUM_FIRST + 1, NUM_FIRST + 2, NUM_FIRST + NUM_BETWEEN, NUM_FIRST + 5])
def test_an_image_that_moves_or_is_evicted_stays_the_same(tiny, folder, call):
    request = two_passes(1, named(folder, "a"), scheduler="euler-a")
    undisturbed = generate(tiny[1], [request])["r1", 0]
    first = NUM_FIRST if call < NUM_FIRST + NUM_BETWEEN else call  # pixels do not move
    assert difference(moved_image(tiny[1], request, call, goes_on_at=first), undisturbed) <= NATURAL_TOLERANCE
    assert difference(evicted_image(tiny[1], request, call), undisturbed) <= NATURAL_TOLERANCE


def test_an_image_that_is_sent_begins_anew_in_another_engine(tiny, folder):
    request, pixels = only_enlarged(1, named(folder, "a"), (600, 30), (1200, 60))
    frame = memoryview(pixels.tobytes())
    undisturbed = generate(tiny[1], [request], frames={"e1": frame})["e1", 0]
    assert difference(moved_image(tiny[1], request, 2, frame, goes_on_at=0), undisturbed) == 0


@pytest.mark.parametrize("result_px", [(611, 333), (700, 333), (300, 500), (2400, 1200)])
def test_a_result_is_resized_by_rows_of_tiles_as_at_once(tiny, folder, result_px):
    request, pixels = only_enlarged(1, named(folder, "a"), (600, 300), result_px)
    executor = tiny[1]
    upscaling = executor.prepare(request, memoryview(pixels.tobytes())).upscaling
    larger = torch.from_numpy(start_pixels(*upscaling.enlarged_px, seed=2))
    made, num_rows, numbers = torch.empty(*result_px[::-1], 3, dtype=torch.uint8), 0, []
    for num_done in (256 * 4, 300 * 4):
        num_rows = upscaling.resize_rows(larger[:num_done], made, num_rows)
        numbers.append(num_rows)
    assert 0 < numbers[0] < numbers[1] == result_px[1]
    assert difference(made.numpy(), upscaling.resize(larger).numpy()) <= 1


def test_running_out_of_memory_at_its_end_changes_no_image(tiny, folder, monkeypatch):
    executor, requests = tiny[1], [two_passes(k, named(folder, "a")) for k in (1, 3)]
    undisturbed = generate(executor, requests)
    original, failures = type(executor._noise).second_pass_of_pixels, iter([False, True])

    def second_pass_of_pixels(self, *arguments):
        if next(failures, False):
            raise torch.OutOfMemoryError("out of memory")
        return original(self, *arguments)

    monkeypatch.setattr(type(executor._noise), "second_pass_of_pixels", second_pass_of_pixels)
    images = generate(executor, requests)
    assert next(failures, None) is None
    for item, pixels in images.items():
        assert difference(pixels, undisturbed[item]) <= NATURAL_TOLERANCE


class _Code:
    def __reduce__(self):
        return print, ("this must not run",)


def write_files(folder):
    (folder / "code.pth").write_bytes(pickle.dumps({"conv_first.weight": _Code()}, 2))
    torch.save({"conv_first.weight": _Code()}, folder / "zipped.pth")
    (folder / "text.pth").write_text("no weights")
    (folder / "cut.safetensors").write_bytes(save_esrgan(folder / "whole.safetensors").read_bytes()[:999])
    torch.save({"layer.weight": torch.zeros(4)}, folder / "other.pth")
    save_esrgan(folder / "failing.pth")
    once = {name: tensor for name, tensor in esrgan_tensors().items() if "conv_up" not in name}
    torch.save(once, folder / "once.pth")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("failing", "failing fails with a tile: no such layer"),
        ("code", "a pickle with more than weights in it"),
        ("zipped", "a pickle with more than weights in it"),
        ("text", "is a pickle with more than weights in it, which could run any code, or is damaged"),
        ("cut", "cut.safetensors"),
        ("other", "spandrel knows no upscaler with these tensors"),
        ("once", "once.pth"),
    ],
)
def test_a_file_that_is_no_upscaler_is_refused_and_runs_no_code(tiny_folder, tmp_path, capsys, monkeypatch, name, says):
    write_files(tmp_path)
    if name == "failing":
        monkeypatch.setattr(PixelModel, "enlarge", _raising(RuntimeError("no such layer")))
    _, executor = load(tiny_folder, upscalers=(str(tmp_path),))
    with pytest.raises(InvalidField, match=says) as refusal:
        executor.prepare(two_passes(1, named(tmp_path, name)))
    assert refusal.value.field == "second_pass"
    assert "this must not run" not in capsys.readouterr().out


def _raising(error):
    def call(*_):
        raise error

    return call


def test_an_upscaler_is_tried_before_it_is_in_a_batch(tiny_folder, folder, monkeypatch):
    _, executor = load(tiny_folder, upscalers=(str(folder),))
    request = two_passes(1, named(folder, "a"))
    with monkeypatch.context() as patch:
        patch.setattr(PixelModel, "enlarge", _raising(torch.OutOfMemoryError("out of memory")))
        with pytest.raises(QueueFull, match="a does not fit the memory"):
            executor.prepare(request)
    prepared = executor.prepare(request)
    assert prepared.longest_iteration_s == 16 * prepared.upscaling.model.tile_s > 0  # 8 slots, guided
    assert executor.prepare(two_passes(1, None)).longest_iteration_s == 0


def test_a_changed_file_is_refused(tiny_folder, tmp_path):
    before = named(save_esrgan(tmp_path / "a.pth").parent, "a")
    save_esrgan(tmp_path / "a.pth", seed=2)
    _, executor = load(tiny_folder, upscalers=(str(tmp_path),))
    with pytest.raises(InvalidField, match="the file of 'a' has changed"):
        executor.prepare(two_passes(1, before))


def test_upscalers_of_requests_are_bounded(tiny_folder, folder, monkeypatch):
    _, executor = load(tiny_folder, upscalers=(str(folder),))
    held = executor.prepare(two_passes(1, named(folder, "a")))
    file_bytes = (folder / "b.safetensors").stat().st_size
    monkeypatch.setattr(prepared_upscaling, "_MAX_MODEL_BYTES", held.upscaling.model.num_bytes + file_bytes - 1)
    with pytest.raises(QueueFull, match="the upscalers of accepted requests take"):
        executor.prepare(two_passes(1, named(folder, "b")))
    del held
    executor.prepare(two_passes(1, named(folder, "b")))


def test_too_large_an_image_and_too_many_are_refused(tiny, folder, monkeypatch):
    executor = DiffusionExecutor(tiny[0 + 1].model, tiny[1].config)
    request, pixels = only_enlarged(1, named(folder, "a"), (600, 500), (601, 501))
    frame = memoryview(pixels.tobytes())
    monkeypatch.setattr(prepared_upscaling, "_MAX_PIXELS", 600 * 500 * 16 - 1)
    with pytest.raises(InvalidField, match="a would make 2400 × 2000 pixels of 600 × 500; at most"):
        executor.prepare(request, frame)
    monkeypatch.undo()
    monkeypatch.setattr(prepared_upscaling, "_MAX_HELD_BYTES", 10**6)
    held = executor.prepare(request, frame)
    with pytest.raises(QueueFull, match="the images that are to be enlarged take"):
        executor.prepare(request, frame)
    del held
    executor.prepare(request, frame)
