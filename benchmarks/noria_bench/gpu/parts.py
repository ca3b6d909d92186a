"""The parts of `make gpu`: commands with an estimate and a limit each, in the order of their worth. Pure."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_PART_S = 180.0
_MAX_SMALL_PART_S = 600.0  # on a busy machine; such parts show that all works, however slow

_UNBATCHED = tuple(f"reference-{name}" for name in ("stream-async", "response-async", "stream-sync", "response-sync"))
_GPU_TESTS = (
    "tests/engine/diffusion/test_executor.py",
    "tests/engine/diffusion/test_timing.py",
    "tests/models/diffusion/transformer_models/test_each_family.py",
    "tests/models/diffusion/transformer_models/test_z_image.py",
    "tests/models/diffusion/unet_models/test_graphed_calls.py",
    "tests/engine/encoder/test_sessions.py",
    "tests/engine/encoder/test_packing.py",
    "benchmarks/tests/device/test_step_timing.py",
)


@dataclass(frozen=True)
class Part:
    """A command, which Python runs in the root of the checkout."""

    name: str
    title: str
    arguments: Sequence[str]  # arguments of the interpreter
    estimate_s: float  # on one H100; small: on two cores
    needs: tuple[str, ...] = ()  # `checks.IMPORTS`, triton, infinity
    limit_s: float = MAX_PART_S


@dataclass(frozen=True)
class Models:
    """The models that the parts serve: folders with random weights, or names that `noria serve` takes."""

    image: str
    encoder: str


def make_parts(out: pathlib.Path, models: Models, *, small: bool) -> list[Part]:
    """All parts, of which some need a GPU and are not among the small ones; their results go to `out`."""
    duration = ("--duration", "4") if small else ()
    device = ("--devices", "cpu") if small else ("--devices", "cuda:0", "--dtype", "bfloat16")

    def scenario2(*targets: str) -> list[str]:
        names = ",".join(targets)
        return [
            *_bench("scenario2", models.image, out / "scenario2"),
            *device,
            *duration,
            "--quick",
            "--targets",
            names,
        ]

    def mixed(*targets: str) -> list[str]:
        options = ["--users", "8", "--mixes", "settings,uniform", "--quick", "--targets", ",".join(targets)]
        return [*_bench("mixed", models.image, out / "mixed"), *device, *duration, *options]

    def encoders(name: str, *targets: str) -> list[str]:
        backend = ("--devices", "cpu", "--encoder-backend", "torch") if small else ("--devices", "cuda:0")
        load = ["--connections", "1,16,128", "--seconds", "1" if small else "2", "--open-loops", "none"]
        options = ["--quick", *load, "--targets", ",".join(targets)]
        return [*_bench("encoders", models.encoder, out / name), *backend, *options]

    def micro(module: str, name: str, *options: str) -> list[str]:
        size = ("--small",) if small else ()
        return ["-m", f"noria_bench.micro.{module}", *options, *size, "-o", str(out / f"{name}.json")]

    def estimate(on_gpu: float, on_cpu: float) -> float:
        return on_cpu if small else on_gpu

    images, texts, denoisers = ("images",), ("texts",), ("denoisers",)
    parts = [
        Part("scenario2-noria", "the article's eight users on Noria, and on the article's batching",
             scenario2("noria", "reference-batched"), estimate(85, 35), images),
        Part("scenario2-reference", "the same users on the article's other endpoints",
             scenario2(*_UNBATCHED), estimate(145, 60), images),
        Part("scenario2-triton", "the same users on Triton's dynamic batching",
             scenario2("triton-50ms", "triton-500ms"), estimate(95, 45), (*images, "triton")),
        Part("encoders-noria", "texts a second: Noria with 1 and 8 front ends, FastAPI",
             encoders("encoders-noria", "noria", "noria-8", "fastapi"), estimate(145, 60), texts),
        Part("encoders-packed", "tokens a second without a server: packed batches of texts beside padded ones",
             micro("packed_texts", "encoders-packed", models.encoder), estimate(30, 10), texts),
        Part("encoders-triton", "texts a second: Triton's dynamic batching with 8 tokenizers and with 1",
             encoders("encoders-triton", "triton-1-batching", "triton-best"), estimate(110, 45), (*texts, "triton")),
        Part("mixed", "eight users with mixed and with uniform settings: Noria and the article's batching",
             mixed("noria", "reference-batched"), estimate(140, 60), images),
        Part("mixed-triton", "the same users on Triton", mixed("triton-50ms"), estimate(75, 30), (*images, "triton")),
        Part("scenario2-triton-0ms", "the article's users on Triton without a delay",
             scenario2("triton-0ms"), estimate(55, 25), (*images, "triton")),
        Part("encoders-unbatched", "texts a second: Triton without batches, and a loop without a server",
             encoders("encoders-unbatched", "raw", "triton-1", "triton-n"), estimate(125, 50), (*texts, "triton")),
        Part("encoders-infinity", "texts a second: Infinity",
             encoders("encoders-infinity", "infinity"), estimate(60, 30), (*texts, "infinity")),
        Part("tests", "the tests that need a GPU", _tests(small=small), estimate(110, 60), ("tests",)),
        Part("device", "steps of denoisers of published sizes, and the engine without a server",
             ["-m", "noria_bench", "device", *(("--device", "cpu", "--quick") if small else ()),
              "--budget", "40" if small else "150", "-o", str(out / "device.json")], estimate(155, 45), denoisers),
        Part("steps-sd15", "SD1.5's calls: captured, compiled, and both, with their share of the peak",
             micro("faster_steps", "steps-sd15", "--models", "sd15"), estimate(110, 8), denoisers),
        Part("steps-sdxl", "the same of SDXL",
             micro("faster_steps", "steps-sdxl", "--models", "sdxl"), estimate(170, 8), denoisers),
        Part("steps-flux", "FLUX.1's calls: compiled, in fp8, half of them, and all together",
             micro("faster_steps", "steps-flux", "--models", "flux"), estimate(150, 15), denoisers),
        Part("steps-z-image", "the same of Z-Image",
             micro("faster_steps", "steps-z-image", "--models", "z-image"), estimate(120, 14), denoisers),
        Part("offload", "FLUX.1's calls with weights that stream, in the memory of a card of 24 GB",
             micro("offloaded_steps", "offload"), estimate(150, 10), denoisers),
    ]  # fmt: skip
    if small:
        return [replace(part, limit_s=_MAX_SMALL_PART_S) for part in parts]
    return [
        *parts,
        Part("graphs", "what CUDA graphs save",
             ["-m", "noria_bench.micro.graphed_steps", "-o", str(out / "graphs.json")], 75, denoisers),
        Part("loras", "what LoRAs add to a step",
             ["-m", "noria_bench.micro.lora_steps", "-o", str(out / "loras.json")], 40, denoisers),
    ]  # fmt: skip


def _bench(name: str, model: str, out: pathlib.Path) -> list[str]:
    return ["-m", "noria_bench", name, model, "--out", str(out)]


def _tests(*, small: bool) -> list[str]:
    chosen = ["-k", "cpu and not slow", *_GPU_TESTS[:2]] if small else ["-m", "gpu", *_GPU_TESTS]
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *chosen]
