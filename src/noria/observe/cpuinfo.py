"""The processor as /proc/cpuinfo describes it. Linux only; elsewhere the architecture's name is all there is."""

import pathlib
import platform


def read_cpuinfo(file: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> dict[str, str]:
    """The fields of the first processor, by the kernel's names ("model name", "flags").

    Empty if the file cannot be read.
    """
    try:
        first = file.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_model() -> str:
    """The processor's model name, or the machine's architecture where the kernel gives none."""
    return read_cpuinfo().get("model name") or platform.machine()
