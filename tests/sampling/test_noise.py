import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.errors import InvalidField
from noria.sampling.noise import MAX_SEED, NoiseStream

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, MAX_SEED), st.integers(0, 8), SHAPES, DTYPES)
def test_draws_equal_those_of_diffusers(seed, image, shape_CHW, dtype):
    generator = torch.Generator().manual_seed(seed + image)
    stream = NoiseStream(seed, shape_CHW, dtype, image=image)
    for ours in (stream.initial(), stream.next(), stream.next()):
        assert torch.equal(ours, randn_tensor((1, *shape_CHW), generator=generator, dtype=dtype)[0])
    assert torch.equal(
        stream.next(torch.float32), randn_tensor((1, *shape_CHW), generator=generator, dtype=torch.float32)[0]
    )


def test_a_start_image_draws_before_the_initial_noise_and_with_a_mask_after_it():
    generator, stream = torch.Generator().manual_seed(3), NoiseStream(3, (4, 8, 9), torch.float16)
    for ours, dtype in (
        (stream.of_start_image(torch.float32), torch.float32),
        (stream.initial(), torch.float16),
        (stream.of_start_image(torch.float32), torch.float32),
        (stream.next(call=0), torch.float16),
    ):
        assert torch.equal(ours, randn_tensor((1, 4, 8, 9), generator=generator, dtype=dtype)[0])


def test_streams_equal_a_list_of_generators():
    generators = [torch.Generator().manual_seed(5 + k) for k in range(3)]
    batched_BCHW = randn_tensor((3, 4, 8, 8), generator=generators, dtype=torch.float32)
    separate_BCHW = torch.stack([NoiseStream(5, (4, 8, 8), torch.float32, image=k).initial() for k in range(3)])
    assert torch.equal(batched_BCHW, separate_BCHW)


def test_image_k_is_image_0_of_seed_plus_k():
    assert torch.equal(
        NoiseStream(5, (4, 8, 8), torch.float32, image=3).initial(), NoiseStream(8, (4, 8, 8), torch.float32).initial()
    )


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_rejected(seed):
    with pytest.raises(InvalidField, match=str(seed)) as caught:
        NoiseStream(seed, (4, 8, 8), torch.float32)
    assert caught.value.field == "seed"


def test_the_initial_noise_must_be_drawn_first_and_once():
    stream = NoiseStream(0, (4, 8, 8), torch.float32)
    with pytest.raises(RuntimeError, match="before"):
        stream.next()
    stream.initial()
    with pytest.raises(RuntimeError, match="once"):
        stream.initial()
