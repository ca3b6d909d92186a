"""Schedules as pipelines set them, and the shifts of diffusers' flow models."""

import itertools

import numpy as np
import pytest
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from noria.sampling.schedule import (
    Schedule,
    evenly_falling_sigmas,
    shift_of_length,
    shift_of_length_and_steps,
    switch_timestep,
)


def test_the_number_of_steps_is_given_where_neither_sigmas_nor_timesteps_say_it():
    times = (1.0, 0.5)
    assert Schedule().arguments(2) == {"num_inference_steps": 2}
    assert Schedule(mu=0.0).arguments(2) == {"num_inference_steps": 2, "mu": 0.0}
    assert Schedule(sigmas=times, timesteps=times).arguments(2) == {"sigmas": [1.0, 0.5], "timesteps": [1.0, 0.5]}
    given = Schedule(sigmas=times, mu=0.8, gives_flow_sigmas=True).arguments(2)
    assert isinstance(given["sigmas"], np.ndarray)
    assert (given["sigmas"].tolist(), given["mu"]) == ([1.0, 0.5], 0.8)
    assert evenly_falling_sigmas(4) == (1.0, 0.75, 0.5, 0.25)


def test_the_second_model_begins_below_the_timestep_of_the_start():
    assert [switch_timestep(start, {}) for start in (0.8, 0.0, 0.7777)] == [200, 1000, 222]
    assert switch_timestep(0.8, {"num_train_timesteps": 500}) == 100


@pytest.mark.parametrize("config", [{}, {"base_image_seq_len": 100, "max_image_seq_len": 900, "base_shift": 0.1}])
def test_the_shift_by_length_is_that_of_flux(config):
    named = {"base_image_seq_len": "base_seq_len", "max_image_seq_len": "max_seq_len", "base_shift": "base_shift"}
    for num_tokens in (4, 256, 4096, 9000):
        theirs = calculate_shift(num_tokens, **{named[name]: value for name, value in config.items()})
        assert shift_of_length(num_tokens, config) == pytest.approx(theirs)


def test_the_shift_by_length_and_steps_is_that_of_flux_2():
    for num_tokens, num_steps in itertools.product((4, 4096, 4300, 4301, 9000), (1, 4, 50, 200)):
        assert shift_of_length_and_steps(num_tokens, num_steps) == compute_empirical_mu(num_tokens, num_steps)
