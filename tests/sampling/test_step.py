import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.sampling import step
from noria.sampling.compile import compile_sampler
from noria.sampling.tables import WINDOW, WINDOWS, SamplerTable, fold, num_columns, ring_window, window_of

SHAPE_CHW = (4, 8, 8)
NUM_ELEMENTS = math.prod(SHAPE_CHW)
CONFIG = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
MIX = [
    ("ddim", 9),
    ("euler-a", 7),
    ("dpm++2m-karras", 12),
    ("pndm", 5),
    ("unipc", 6),
    ("heun", 4),
    ("dpm++2m-sde", 3),
    ("lcm", 2),
]


class Image:
    """A table, with random numbers in place of the model's outputs and the noise."""

    def __init__(self, number: int) -> None:
        name, num_steps = MIX[number]
        self.table: SamplerTable = compile_sampler(name, CONFIG, num_steps)
        random = torch.Generator().manual_seed(number)
        self.start = torch.randn(NUM_ELEMENTS, generator=random) * self.table.init_noise_sigma
        self.outputs = torch.randn((self.table.num_calls, NUM_ELEMENTS), generator=random)
        self.noise = torch.randn((self.table.num_calls, NUM_ELEMENTS), generator=random)
        self.cursor = 0

    @property
    def done(self) -> bool:
        return self.cursor == self.table.num_calls


def advance(history, images: list[Image], slots: list[int]) -> torch.Tensor:
    """Advance `images` in their slots by one call."""
    cursors = [image.cursor for image in images]
    rows = np.stack([image.table.coefficients[image.cursor] for image in images])
    rows = torch.from_numpy(fold(rows, window_of(history.shape[1])))
    outputs = torch.stack([image.outputs[image.cursor] for image in images])
    noise = torch.stack([image.noise[image.cursor] for image in images])
    has_noise = any(image.table.noise[image.cursor] for image in images)
    at = history, torch.tensor(slots), torch.tensor(cursors)
    samples = step.next_samples(*at, outputs, noise if has_noise else None, rows)
    step.write_samples(*at, samples)
    for image in images:
        image.cursor += 1
    return samples


def run_in_own_batch(number: int) -> torch.Tensor:
    image = Image(number)
    history = step.empty_history(1, NUM_ELEMENTS, ring_window(image.table.window))
    step.init_slot(history, 0, image.start)
    while not image.done:
        samples = advance(history, [image], [0])
    return samples[0]


@settings(max_examples=20, deadline=None)
@given(
    st.permutations(range(len(MIX))), st.lists(st.integers(0, 4), min_size=len(MIX), max_size=len(MIX)), st.randoms()
)
def test_an_image_in_a_mixed_batch_equals_the_image_alone(slots, joins_at, random):
    """Bitwise, whatever its slot, its position in the batch, the other images and the iteration at which each joins.

    Alone it has a history as wide as its table needs; together all have one that becomes wider as they join.
    """
    history = step.empty_history(len(MIX), NUM_ELEMENTS, 1)
    images = [Image(number) for number in range(len(MIX))]
    finished: dict[int, torch.Tensor] = {}
    iteration = 0
    while len(finished) < len(MIX):
        for number in range(len(MIX)):
            if joins_at[number] == iteration:
                window = ring_window(images[number].table.window)
                if window > window_of(history.shape[1]):
                    history = step.widen(history, window)
                step.init_slot(history, slots[number], images[number].start)
        in_flight = [n for n in range(len(MIX)) if joins_at[n] <= iteration and n not in finished]
        random.shuffle(in_flight)
        iteration += 1
        if not in_flight:
            continue
        samples = advance(history, [images[n] for n in in_flight], [slots[n] for n in in_flight])
        finished |= {n: sample for n, sample in zip(in_flight, samples, strict=True) if images[n].done}
    for number, sample in finished.items():
        assert torch.equal(sample, run_in_own_batch(number)), MIX[number]
        at = torch.tensor([slots[number]]), torch.tensor([images[number].cursor])
        assert torch.equal(step.samples(history, *at)[0], sample), "a finished image keeps its last sample"


def test_nan_in_a_slot_does_not_reach_its_next_image():
    history = step.empty_history(1, NUM_ELEMENTS, WINDOW)
    history.fill_(float("nan"))
    image = Image(0)
    step.init_slot(history, 0, image.start)
    assert advance(history, [image], [0]).isfinite().all()


def test_nan_from_the_model_stays_in_its_image():
    history = step.empty_history(2, NUM_ELEMENTS, WINDOW)
    broken, intact = Image(2), Image(2)
    broken.outputs[1] = float("nan")
    for slot in (0, 1):
        step.init_slot(history, slot, intact.start)
    while not intact.done:
        samples = advance(history, [broken, intact], [0, 1])
    assert samples[0].isnan().any()
    assert torch.equal(samples[1], run_in_own_batch(2))


def test_the_models_input_is_the_scaled_current_sample():
    history = step.empty_history(3, NUM_ELEMENTS, WINDOW)
    history[1, 6 % WINDOW] = 5.0
    inputs = step.model_inputs(history, torch.tensor([1]), torch.tensor([6]), torch.tensor([0.5]))
    assert inputs.shape == (1, NUM_ELEMENTS)
    assert (inputs == 2.5).all()


@pytest.mark.parametrize("window", WINDOWS)
def test_the_weighted_sum_includes_every_column(window):
    columns = num_columns(window)
    history = torch.arange(1.0, columns + 1)[None, :, None].expand(1, columns, NUM_ELEMENTS).clone()
    weights = torch.tensor([[10.0**k for k in range(columns)]], dtype=torch.float64)
    summed = step._weighted_sum(history.double(), weights)
    assert (summed == int("987654321"[-columns:])).all()
