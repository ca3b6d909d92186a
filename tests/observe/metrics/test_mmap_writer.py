"""A process's file has every value, as prometheus_client itself reads it."""

from prometheus_client.mmap_dict import MmapedDict, mmap_key

from noria.observe.metrics.mmap_writer import AllocatedMmapDict


def key(number):
    return mmap_key("noria_x", "noria_x_total", ["a"], [str(number)], "Help.")


def read(path):
    return {name: value for name, value, _, _ in MmapedDict.read_all_values_from_file(str(path))}


def test_values_are_kept_while_the_file_grows_and_when_it_is_opened_again(tmp_path):
    path = tmp_path / "counter_1.db"
    expected = {key(number): number + 0.5 for number in range(2000)}
    for part in range(2):
        file = AllocatedMmapDict(str(path))
        for name, value in list(expected.items())[part * 1000 :][:1000]:
            assert file.read_value(name) == (0.0, 0.0)
            file.write_value(name, value, 0.0)
        assert file.read_value(key(0)) == (0.5, 0.0)
        file.write_value(key(7), expected[key(7)] + part, 0.0)
        file.close()
    assert path.stat().st_size > 64 * 1024
    assert read(path) == expected | {key(7): 8.5}


def test_a_file_without_values_is_not_made(tmp_path):
    AllocatedMmapDict(str(tmp_path / "counter_1.db")).close()
    assert not list(tmp_path.iterdir())
