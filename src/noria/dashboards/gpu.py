"""GPU and engine: what the device does, beside what the wheel gives it to do.

GPUs are read under dcgm-exporter's names, whether from dcgm-exporter or from Noria itself; where both tell of a GPU, it is shown once.
dcgm-exporter's label for the machine was renamed once, so that panels ask by `gpu` and `UUID` alone.
"""

from noria.dashboards.panels import Dashboard, Query, Row, stat, states, timeseries

_INSTANCE_FILTER = 'instance=~"$instance"'
_ENGINE_LEGEND = "{{instance}} {{engine}}"


def _sum_by_engine(metric: str, rate: str = "") -> str:
    """A figure of each engine of each server; of a counter, its increase a second over `rate`."""
    selector = f"{metric}{{{_INSTANCE_FILTER}}}"
    return f"sum by (instance, engine) ({f'rate({selector}[{rate}])' if rate else selector})"


def _per_engine(metric: str, rate: str = "", legend: str = _ENGINE_LEGEND) -> Query:
    return Query(_sum_by_engine(metric, rate), legend)


def _per_gpu(metric: str, legend: str = "GPU {{gpu}}") -> Query:
    """A figure of each GPU, once, whoever tells it."""
    return Query(f"max by (gpu, UUID) ({metric})", legend)


_PER_ENGINE_ROW = Row(
    "Each engine",
    (
        states(
            "Ready",
            "1 is ready; 0 loads its model, or has ended.",
            _per_engine("noria_engine_up"),
        ),
        timeseries(
            "Busy",
            "Share of time in turns. One far below the others gets less to do, or has just come.",
            _per_engine("noria_engine_busy_seconds_total", rate="1m"),
            unit="percentunit",
        ),
        timeseries(
            "Slots used",
            "Images in the batch, and how many can be.",
            _per_engine("noria_slots_used"),
            _per_engine("noria_slots", legend=f"of {_ENGINE_LEGEND}"),
        ),
        timeseries("Waiting", "Images that wait for one of its slots.", _per_engine("noria_queue_depth")),
        timeseries(
            "Batch",
            "Images a turn, on average. None where there was no turn.",
            Query(
                f"{_sum_by_engine('noria_batch_size_sum', '1m')} / ({_sum_by_engine('noria_batch_size_count', '1m')} > 0)",
                _ENGINE_LEGEND,
            ),
        ),
        timeseries(
            "A turn",
            "Mean time of a turn. One far above the others, with the same batch, has a slower or sicker device.",
            Query(
                f"{_sum_by_engine('noria_engine_busy_seconds_total', '1m')} / ({_sum_by_engine('noria_turns_total', '1m')} > 0)",
                _ENGINE_LEGEND,
            ),
            unit="s",
        ),
        timeseries(
            "Image steps/s",
            "Steps of single images: what each engine has done of the work.",
            _per_engine("noria_denoise_steps_total", rate="1m"),
            stacked=True,
        ),
        timeseries(
            "Memory held",
            "On its device; of a CPU, its resident memory.",
            _per_engine("noria_device_memory_bytes"),
            unit="bytes",
        ),
        timeseries(
            "Out of memory",
            "Turns in five minutes that did not fit, by what did not.",
            Query(
                f"sum by (instance, engine, part) (increase(noria_out_of_memory_total{{{_INSTANCE_FILTER}}}[5m]))",
                f"{_ENGINE_LEGEND} {{{{part}}}}",
            ),
            stacked=True,
        ),
        timeseries(
            "Ended and started again",
            "In five minutes, by how: `crashed` is their own doing or a request's, `killed` somebody else's.",
            Query(
                f'sum by (instance, engine, previous_end) (increase(noria_engine_starts_total{{{_INSTANCE_FILTER},previous_end!="none"}}[5m]))',
                f"{_ENGINE_LEGEND} {{{{previous_end}}}}",
            ),
            stacked=True,
        ),
    ),
)

GPU = Dashboard(
    "noria-gpu",
    "Noria: GPU and engine",
    "What the device does, beside what the wheel gives it to do.",
    (
        Row(
            "Engine",
            (
                stat(
                    "Engines ready",
                    "None is a reason to wake somebody.",
                    f"sum(noria_engine_up{{{_INSTANCE_FILTER}}}) or vector(0)",
                ),
                stat(
                    "Busy",
                    "Share of time in turns, of the engines that are ready.",
                    f"sum(rate(noria_engine_busy_seconds_total{{{_INSTANCE_FILTER}}}[1m])) / (sum(noria_engine_up{{{_INSTANCE_FILTER}}}) > 0)",
                    unit="percentunit",
                ),
                stat(
                    "Turns/s",
                    "Of the wheel: nearly all are steps of the whole batch.",
                    f"sum(rate(noria_turns_total{{{_INSTANCE_FILTER}}}[1m]))",
                ),
                stat(
                    "Image steps/s",
                    "Steps of single images.",
                    f"sum(rate(noria_denoise_steps_total{{{_INSTANCE_FILTER}}}[1m]))",
                ),
                stat(
                    "Mean batch",
                    "Images a turn.",
                    f"sum(rate(noria_batch_size_sum{{{_INSTANCE_FILTER}}}[1m])) / (sum(rate(noria_batch_size_count{{{_INSTANCE_FILTER}}}[1m])) > 0)",
                ),
                stat(
                    "Restarts, 1 h",
                    "Engines that ended and were started again.",
                    f'sum(increase(noria_engine_starts_total{{{_INSTANCE_FILTER},previous_end!="none"}}[1h]))',
                    alarm=1,
                ),
                stat(
                    "Out of memory, 1 h",
                    "Turns that did not fit; nobody failed by them.",
                    f"sum(increase(noria_out_of_memory_total{{{_INSTANCE_FILTER}}}[1h]))",
                    alarm=1,
                ),
                stat(
                    "Memory held",
                    "By engines, on their devices.",
                    f"sum(noria_device_memory_bytes{{{_INSTANCE_FILTER}}})",
                    unit="bytes",
                ),
            ),
        ),
        _PER_ENGINE_ROW,
        Row(
            "GPU",
            (
                timeseries(
                    "Utilisation",
                    "Share of time in which any kernel ran: 100 % does not mean that it is full. And in which its memory was read or written.",
                    _per_gpu("DCGM_FI_DEV_GPU_UTIL"),
                    _per_gpu("DCGM_FI_DEV_MEM_COPY_UTIL", "memory of GPU {{gpu}}"),
                    unit="percent",
                ),
                timeseries(
                    "Memory",
                    "Framebuffer in use, and free.",
                    _per_gpu("DCGM_FI_DEV_FB_USED"),
                    _per_gpu("DCGM_FI_DEV_FB_FREE", "free of GPU {{gpu}}"),
                    unit="decmbytes",
                ),
                timeseries("Power", "Draw of the board.", _per_gpu("DCGM_FI_DEV_POWER_USAGE"), unit="watt"),
                timeseries("Temperature", "Of the GPU.", _per_gpu("DCGM_FI_DEV_GPU_TEMP"), unit="celsius"),
                timeseries("Clock", "Of the multiprocessors.", _per_gpu("DCGM_FI_DEV_SM_CLOCK"), unit="rotmhz"),
                timeseries(
                    "Energy an image",
                    "Joules: of all GPUs, over all images.",
                    Query(
                        "sum(max by (UUID) (rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m]))) / 1000 / (sum(rate(noria_images_total[5m])) > 0)",
                        "J/image",
                    ),
                ),
            ),
        ),
    ),
)
