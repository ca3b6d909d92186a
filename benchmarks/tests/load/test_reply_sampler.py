"""The choice of the replies of a run that are stored."""

import itertools

import pytest

from noria_bench.load.reply_sampler import ReplySampler, sampled_replies


@pytest.mark.parametrize("num_replies", [5, 13, 100, 1000])
def test_4_to_12_evenly_spaced_replies_are_stored(tmp_path, num_replies):
    sampler = ReplySampler(tmp_path)
    for number in range(num_replies):
        sampler.offer(number, b"%d" % number, "image/png")
    found = sampled_replies(tmp_path)
    numbers = list(found)
    assert 4 <= len(numbers) <= 12
    assert len({later - earlier for earlier, later in itertools.pairwise(numbers)}) == 1
    assert numbers[-1] >= num_replies * 2 / 3
    assert all(file.read_bytes() == b"%d" % number for number, file in found.items())


def test_requests_of_several_users_are_stored(tmp_path):
    sampler = ReplySampler(tmp_path)
    for number in range(800):
        sampler.offer(number, b"", "image/png")
    assert len({number % 8 for number in sampled_replies(tmp_path)}) >= 4


def test_the_suffix_distinguishes_one_image_from_several(tmp_path):
    sampler = ReplySampler(tmp_path)
    sampler.offer(0, b"png", "image/png")
    sampler.offer(1, b"{}", "application/json")
    assert [file.name for file in sampled_replies(tmp_path).values()] == ["0.image", "1.json"]
