"""Dashboard "GPU and engine": the load of the devices, and the batches that cause it.

GPU metrics have dcgm-exporter's names, and come from dcgm-exporter or from Noria itself; a GPU that both export is
shown once. dcgm-exporter has renamed its label for the machine before, so panels select by `gpu` and `UUID` only.
"""

from noria.dashboards.panels import Dashboard, Query, mean, query, row, stat, states, timeseries

_ENGINE_LEGEND = "{{instance}} {{engine}}"


def _per_engine(metric: str, rate: str = "", legend: str = _ENGINE_LEGEND) -> Query:
    """Return the query of a metric by server and engine; of a counter, its increase per second over `rate`."""
    return query(f"sum by (instance, engine) ({f'rate({metric}[{rate}])' if rate else metric})", legend)


def _mean_per_engine(total: str, count: str) -> Query:
    return mean(total, count, "instance", "engine", legend=_ENGINE_LEGEND, window="1m")


def _per_gpu(metric: str, legend: str = "GPU {{gpu}}") -> Query:
    """Return the query of a metric by GPU, with each GPU once even if two exporters have it."""
    return Query(f"max by (gpu, UUID) ({metric})", legend)


_PER_ENGINE_ROW = row(
    "By engine",
    states("Ready", "1: ready. 0: loading its model, or ended.", _per_engine("noria_engine_up")),
    timeseries(
        "Busy",
        "Share of time in iterations. An engine far below the others gets less work, or has just started.",
        _per_engine("noria_engine_busy_seconds_total", rate="1m"),
        unit="percentunit",
    ),
    timeseries(
        "Slots used",
        "Images in the batch, and the number of slots.",
        _per_engine("noria_slots_used"),
        _per_engine("noria_slots", legend=f"of {_ENGINE_LEGEND}"),
    ),
    timeseries("Waiting", "Images that wait for a slot of the engine.", _per_engine("noria_queue_depth")),
    timeseries(
        "Batch size",
        "Mean number of images per iteration. No value without iterations.",
        _mean_per_engine("noria_batch_size_sum", "noria_batch_size_count"),
    ),
    timeseries(
        "Iteration time",
        "Mean time of an iteration. An engine far above the others, with equal batches, has a slow or faulty device.",
        _mean_per_engine("noria_engine_busy_seconds_total", "noria_iterations_total"),
        unit="s",
    ),
    timeseries(
        "Image steps/s",
        "Denoising steps of single images: each engine's share of the work.",
        _per_engine("noria_denoise_steps_total", rate="1m"),
        stacked=True,
    ),
    timeseries(
        "Memory held",
        "On its device; on a CPU, its resident memory.",
        _per_engine("noria_device_memory_bytes"),
        unit="bytes",
    ),
    timeseries(
        "Out of memory",
        "Iterations in five minutes that did not fit into memory, by phase.",
        query(
            "sum by (instance, engine, phase) (increase(noria_out_of_memory_total[5m]))",
            f"{_ENGINE_LEGEND} {{{{phase}}}}",
        ),
        stacked=True,
    ),
    timeseries(
        "Restarts",
        "In five minutes, by cause. `crashed`: by the engine or a request; `killed`: by a signal from outside.",
        query(
            'sum by (instance, engine, previous_exit) (increase(noria_engine_starts_total{previous_exit!="none"}[5m]))',
            f"{_ENGINE_LEGEND} {{{{previous_exit}}}}",
        ),
        stacked=True,
    ),
)

GPU = Dashboard(
    "noria-gpu",
    "Noria: GPU and engine",
    "The load of the devices, and the batches that cause it.",
    (
        row(
            "Engine",
            stat("Engines ready", "With 0 the server can generate nothing.", "sum(noria_engine_up) or vector(0)"),
            stat(
                "Busy",
                "Share of time in iterations, of the engines that are ready.",
                "sum(rate(noria_engine_busy_seconds_total[1m])) / (sum(noria_engine_up) > 0)",
                unit="percentunit",
            ),
            stat(
                "Iterations/s",
                "Of the engine loop; nearly all are denoising steps of the batch.",
                "sum(rate(noria_iterations_total[1m]))",
            ),
            stat("Image steps/s", "Denoising steps of single images.", "sum(rate(noria_denoise_steps_total[1m]))"),
            stat(
                "Mean batch size",
                "Images per iteration.",
                "sum(rate(noria_batch_size_sum[1m])) / (sum(rate(noria_batch_size_count[1m])) > 0)",
            ),
            stat(
                "Restarts, 1 h",
                "Engines that ended and were restarted.",
                'sum(increase(noria_engine_starts_total{previous_exit!="none"}[1h]))',
                threshold=1,
            ),
            stat(
                "Out of memory, 1 h",
                "Iterations that did not fit into memory; they are repeated with a smaller batch.",
                "sum(increase(noria_out_of_memory_total[1h]))",
                threshold=1,
            ),
            stat("Memory held", "By engines, on their devices.", "sum(noria_device_memory_bytes)", unit="bytes"),
        ),
        _PER_ENGINE_ROW,
        row(
            "GPU",
            timeseries(
                "Utilisation",
                "Share of time in which a kernel ran, or memory was accessed. 100 % does not mean saturation.",
                _per_gpu("DCGM_FI_DEV_GPU_UTIL"),
                _per_gpu("DCGM_FI_DEV_MEM_COPY_UTIL", "memory of GPU {{gpu}}"),
                unit="percent",
            ),
            timeseries(
                "Memory",
                "Framebuffer used and free.",
                _per_gpu("DCGM_FI_DEV_FB_USED"),
                _per_gpu("DCGM_FI_DEV_FB_FREE", "free of GPU {{gpu}}"),
                unit="decmbytes",
            ),
            timeseries("Power", "Power draw of the board.", _per_gpu("DCGM_FI_DEV_POWER_USAGE"), unit="watt"),
            timeseries("Temperature", "Of the GPU.", _per_gpu("DCGM_FI_DEV_GPU_TEMP"), unit="celsius"),
            timeseries("Clock", "Clock of the multiprocessors.", _per_gpu("DCGM_FI_DEV_SM_CLOCK"), unit="rotmhz"),
            timeseries(
                "Energy per image",
                "In joules: of all GPUs, divided by all images.",
                Query(
                    "sum(max by (UUID) (rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m]))) / 1000 / "
                    "(sum(rate(noria_images_total[5m])) > 0)",
                    "J/image",
                ),
            ),
        ),
    ),
)
