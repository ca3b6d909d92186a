"""Small calls are captured by their shapes; the graphs compute what the module does."""

import pytest
import torch

import tiny_models
from generating import difference, generate
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.models.cuda_graph import CudaGraph, free_memory
from noria.models.diffusion.unet_models import graphed_calls
from noria.models.diffusion.unet_models.graphed_calls import GraphedCalls, without_graphs
from noria.models.diffusion.unet_models.stable_diffusion_xl import StableDiffusionXL
from noria.protocol.diffusion import Lora
from noria.testing.requests import make_image_request

LATENTS = torch.ones(2, 4, 8, 8)


class RecordedCalls:
    """A module, and a stand-in of `CudaGraph` that, like a graph, computes again with the tensors of its capture."""

    def __init__(self):
        self.num_calls, self.num_captures, self.num_replays, self.error = 0, 0, 0, None

    def module(self, latents, time, *, text, added, mask=None):
        self.num_calls += 1
        return (
            latents * time[:, None, None, None] + text.sum() + added["size"].sum() + (0 if mask is None else mask.sum())
        )

    def capture(self, call, device, pool, num_warm_ups):
        self.num_captures += 1
        if self.error is not None:
            raise self.error
        recorded = self

        class Graph:
            def replay(self):
                recorded.num_replays += 1
                recorded.num_calls -= 1
                return call()

        return Graph()

    def graphed(self):
        return GraphedCalls(self.module, torch.device("cpu"), self.capture)


def arguments(latents=LATENTS, text=3.0):
    return (latents, torch.full((len(latents),), 2.0)), {"text": torch.full((2, 3), text), "added": {"size": LATENTS}}


def test_a_shape_is_captured_when_it_occurs_again_and_then_computed_with_new_values():
    calls = RecordedCalls()
    graphed = calls.graphed()
    for number in range(4):
        args, kwargs = arguments(LATENTS + number, text=float(number))
        assert torch.equal(graphed(*args, **kwargs), RecordedCalls().module(*args, **kwargs))
    assert (calls.num_calls, calls.num_captures, calls.num_replays) == (1, 1, 3)
    for latents in (LATENTS[:1], LATENTS[..., :4], LATENTS.half()):
        graphed(*arguments(latents)[0], **arguments()[1])
    masked = {**arguments()[1], "mask": torch.ones(2)}
    graphed(*arguments()[0], **masked)
    assert (calls.num_calls, calls.num_captures) == (5, 1), "each of these has other shapes"


def test_large_calls_and_those_that_hooks_change_are_not_captured(monkeypatch):
    calls = RecordedCalls()
    graphed = calls.graphed()
    args, kwargs = arguments()
    for _ in range(3):
        with without_graphs():
            graphed(*args, **kwargs)
    monkeypatch.setattr(graphed_calls, "MAX_LATENTS", LATENTS.numel() // 4 - 1)
    for _ in range(3):
        graphed(*args, **kwargs)
    assert (calls.num_calls, calls.num_captures) == (6, 0)


def test_what_cannot_be_captured_is_computed_and_not_tried_again(caplog):
    calls = RecordedCalls()
    calls.error = torch.OutOfMemoryError("CUDA out of memory")
    graphed = calls.graphed()
    args, kwargs = arguments()
    for _ in range(4):
        assert torch.equal(graphed(*args, **kwargs), RecordedCalls().module(*args, **kwargs))
    assert (calls.num_calls, calls.num_captures) == (4, 1)
    assert "shape (2, 4, 8, 8) cannot be captured as a CUDA graph: CUDA out of memory" in caplog.text


def test_the_least_recently_used_graph_goes_first(monkeypatch):
    monkeypatch.setattr(graphed_calls, "_MAX_GRAPHS", 2)
    calls = RecordedCalls()
    graphed = calls.graphed()
    first, second, third = (LATENTS[..., :width] for width in (2, 4, 6))
    for latents in (first, first, second, second, first, third, first, second):
        graphed(*arguments(latents)[0], **arguments()[1])
    assert calls.num_captures == 2, "the first is still there, the second is warmed up anew"
    graphed(*arguments(second)[0], **arguments()[1])
    assert calls.num_captures == 3


def test_a_first_call_that_fails_is_no_warm_up():
    """In the capture, libraries would do what they do in their first call, and cannot do in one."""
    calls, errors = RecordedCalls(), [torch.OutOfMemoryError("CUDA out of memory")]

    def module(*args, **kwargs):
        if errors:
            raise errors.pop()
        return calls.module(*args, **kwargs)

    graphed = GraphedCalls(module, torch.device("cpu"), calls.capture)
    args, kwargs = arguments()
    with pytest.raises(torch.OutOfMemoryError):
        graphed(*args, **kwargs)
    graphed(*args, **kwargs)
    assert calls.num_captures == 0
    graphed(*args, **kwargs)
    assert calls.num_captures == 1


@pytest.mark.gpu
def test_a_capture_that_is_broken_off_leaves_stream_and_memory_usable():
    device, stream = torch.device("cuda:0"), torch.cuda.current_stream("cuda:0")
    ones = torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        CudaGraph(lambda: ones.sum().item(), device, torch.cuda.graph_pool_handle(), num_warm_ups=1)
    assert torch.cuda.current_stream(device) == stream
    free_memory(device)
    graph = CudaGraph(lambda: ones + 1, device, torch.cuda.graph_pool_handle(), num_warm_ups=1)
    assert graph.replay().tolist() == [2.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_with_graphs_are_those_without(tmp_path, dtype):
    """Also of rows with adapters, whose calls are not captured, between others."""
    spec = open_model(str(tiny_models.save_stable_diffusion_xl(tmp_path / "xl")))
    (tmp_path / "loras").mkdir()
    images, held = [], []
    for cuda_graphs in (False, True):
        config = EngineConfig(
            dtype=dtype,
            slots=4,
            threads=1,
            channels_last=False,
            attention="sdpa",
            cuda_graphs=cuda_graphs,
            loras=(str(tmp_path / "loras"),),
        )
        model = StableDiffusionXL.load(spec, config, "cuda:0")
        file = tmp_path / "loras" / "style.safetensors"
        if not file.exists():
            save_diffusers_lora(file, {"unet": model.unet}, "to_q", "to_v", rank=4, seed=1)
        adapted = (Lora("style", 1.0, digest_of(file)),)
        requests = [
            make_image_request(
                f"r{k}", seed=k, inference_steps=4 + k, width=32, height=32, loras=adapted if k == 2 else ()
            )
            for k in range(5)
        ]
        images.append(generate(DiffusionExecutor(model, config), requests, [0, 2, 3, 5, 9]))
        held.append(getattr(model._denoiser._unet, "_graphs", {}).values())
    assert all(difference(images[1][key], image) <= 1 for key, image in images[0].items())
    assert not held[0] and sum(isinstance(graph, graphed_calls._Graph) for graph in held[1]) >= 2
