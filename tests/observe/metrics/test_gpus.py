"""NVIDIA GPU metrics, with a fake NVML."""

from types import SimpleNamespace

from noria.observe.metrics.declarations import GPU_METRICS
from noria.observe.metrics.gpus import gpu_metrics


class NVMLError(Exception):
    pass


def nvml(**differences):
    """A fake with two GPUs; the second does not report its energy."""

    def energy(gpu):
        if gpu == 1:
            raise NVMLError("Not Supported")
        return 5_000

    attributes = {
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}".encode(),
        "nvmlDeviceGetName": lambda gpu: "NVIDIA H100",
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=90 + gpu, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=3 * 2**30, free=2**30),
        "nvmlDeviceGetTemperature": lambda gpu, kind: 61,
        "nvmlDeviceGetPowerUsage": lambda gpu: 250_500,
        "nvmlDeviceGetTotalEnergyConsumption": energy,
        "nvmlDeviceGetClockInfo": lambda gpu, kind: 1700,
    }
    return SimpleNamespace(**attributes | differences)


def samples(families):
    return {(sample.name, sample.labels["gpu"]): sample for family in families for sample in family.samples}


def test_every_gpu_has_all_metrics_in_dcgm_exporters_units():
    found = samples(gpu_metrics(nvml()))
    assert {name for name, gpu in found if gpu == "0"} == set(GPU_METRICS)
    assert found["DCGM_FI_DEV_GPU_UTIL", "1"].value == 91
    assert found["DCGM_FI_DEV_FB_USED", "0"].value == 3072
    assert found["DCGM_FI_DEV_POWER_USAGE", "0"].value == 250.5
    assert found["DCGM_FI_DEV_POWER_USAGE", "0"].labels == {"gpu": "0", "UUID": "GPU-0", "modelName": "NVIDIA H100"}


def test_metrics_that_a_gpu_does_not_report_are_left_out():
    found = samples(gpu_metrics(nvml()))
    assert ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "0") in found
    assert ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "1") not in found


def test_a_gpu_that_is_lost_hides_no_other():
    def handle(number):
        if number == 0:
            raise NVMLError("GPU is lost")
        return number

    assert {gpu for _, gpu in samples(gpu_metrics(nvml(nvmlDeviceGetHandleByIndex=handle)))} == {"1"}


def test_without_a_driver_there_are_no_metrics_and_no_error():
    def count():
        raise NVMLError("Driver Not Loaded")

    assert samples(gpu_metrics(nvml(nvmlDeviceGetCount=count))) == {}


def test_without_nvml_there_are_no_metrics():
    assert gpu_metrics(None) == []
