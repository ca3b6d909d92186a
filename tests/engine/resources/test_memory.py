"""Whether a model fits the free memory."""

import psutil
import pytest

from noria.engine.resources.memory import check_memory, free_memory_bytes
from noria.errors import ModelError
from noria.observe import cgroup


def test_weights_need_a_quarter_more_and_a_fixed_amount():
    check_memory("m", 80, "cpu", lambda _device: 100 + 2**26)
    with pytest.raises(ModelError) as rejected:
        check_memory("m", 2000, "cpu", lambda device: {"cpu": 2499 + 2**26}[device])
    assert rejected.value.message == (
        "m needs 67,111,364 bytes of the memory of cpu, of which 67,111,363 are free. Deploy it with "
        "--swap, which unloads what serves first, or use a device with more memory."
    )


def test_the_memory_of_a_cpu_is_that_of_the_machine_and_of_the_group(monkeypatch):
    available = psutil.virtual_memory().total * 2
    monkeypatch.setattr(cgroup, "free_memory", lambda: 5)
    assert free_memory_bytes("cpu") == 5
    monkeypatch.setattr(cgroup, "free_memory", lambda: available)
    assert 0 < free_memory_bytes("cpu") < available
    monkeypatch.setattr(cgroup, "free_memory", lambda: None)
    assert 0 < free_memory_bytes("cpu") < available
