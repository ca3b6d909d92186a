"""The meters of the hardware: counters that wrap, and a fake NVML."""

import types

import pytest

from noria_bench.measurement.hardware_meters import GpuReading, RaplMeter, counter_increase, find_gpus, matrix_gflops


class NVMLError(Exception):
    pass


def fake_nvml():
    """Two GPUs; number 1 does not report its energy."""

    def handle_by_index(index):
        if index > 1:
            raise NVMLError("not found")
        return index

    def energy(handle):
        if handle == 1:
            raise NVMLError("not supported")
        return 5000

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetHandleByIndex=handle_by_index,
        nvmlDeviceGetHandleByUUID={"GPU-a": 0, "GPU-b": 1}.__getitem__,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=80 + 10 * handle),
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=1000 * (handle + 1)),
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )


def test_a_gpu_is_read_and_several_together_without_an_energy_that_one_does_not_report():
    assert find_gpus(("cuda:0",), {}, fake_nvml()).read() == GpuReading(0.8, 0, 5.0)
    assert find_gpus(("auto",), {}, fake_nvml()).read() == GpuReading(0.8, 0, 5.0)
    both = find_gpus(("cuda:0", "cuda:1"), {}, fake_nvml())
    assert (both.names, both.read()) == (["GPU 0", "GPU 1"], GpuReading(pytest.approx(0.85), 0, None))


def test_memory_in_use_before_the_server_started_is_not_counted():
    nvml = fake_nvml()
    gpus = find_gpus(("cuda:0", "cuda:1"), {}, nvml)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=1000 * (handle + 1) + 50)
    assert gpus.read().used_bytes == 100
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=500)  # somebody else has left
    assert gpus.read().used_bytes == 0


@pytest.mark.parametrize("visible", ["1,0", "GPU-b,GPU-a"])
def test_devices_are_numbered_as_cuda_numbers_them(visible):
    assert find_gpus(("cuda",), {"CUDA_VISIBLE_DEVICES": visible}, fake_nvml()).names == ["GPU 1"]


def test_without_a_gpu_there_is_nothing_to_read():
    assert find_gpus(("cpu",), {}, fake_nvml()) is None
    assert find_gpus(("cuda:5",), {}, fake_nvml()) is None
    for visible in ("", "-1", "-1,0"):
        assert find_gpus(("auto",), {"CUDA_VISIBLE_DEVICES": visible}, fake_nvml()) is None


def test_a_gpu_slice_without_utilisation_is_not_read():
    nvml = fake_nvml()

    def utilisation(handle):
        raise NVMLError("not supported")

    nvml.nvmlDeviceGetUtilizationRates = utilisation
    assert find_gpus(("cuda",), {}, nvml) is None


def test_the_increase_of_a_counter_that_wraps():
    assert counter_increase(100, 150, 1000) == 50
    assert counter_increase(900, 30, 1000) == 130


def test_packages_are_added_up_without_their_subzones(tmp_path):
    def write_zone(name, energy_uj):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")

    write_zone("intel-rapl:0", 9_000_000)
    write_zone("intel-rapl:1", 0)
    write_zone("intel-rapl:0:0", 0)
    rapl = RaplMeter(tmp_path)
    write_zone("intel-rapl:0", 1_000_000)
    write_zone("intel-rapl:1", 500_000)
    write_zone("intel-rapl:0:0", 9_000_000)
    assert rapl.total_j() == pytest.approx(2.5)
    write_zone("intel-rapl:1", 1_500_000)
    assert rapl.total_j() == pytest.approx(3.5)


def test_without_packages_there_is_no_energy(tmp_path):
    assert RaplMeter(tmp_path).total_j() is None


def test_the_matrix_rate_is_plausible():
    assert 0.01 < matrix_gflops(0.0) < 1e6  # one product is measured, however little time there is
