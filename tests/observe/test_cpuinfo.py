"""The first processor of /proc/cpuinfo."""

from noria.observe.cpuinfo import cpu_model, read_cpuinfo


def test_the_first_processors_fields_are_read(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: A CPU: 3 GHz\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nmodel name\t: Another\n"
    )
    assert read_cpuinfo(file) == {"processor": "0", "model name": "A CPU: 3 GHz", "flags": "fpu avx2"}


def test_without_the_file_there_are_no_fields(tmp_path):
    assert read_cpuinfo(tmp_path / "none") == {}


def test_a_machine_always_has_a_model_name():
    assert cpu_model()
