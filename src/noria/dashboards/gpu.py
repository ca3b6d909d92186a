"""GPU and engine: what the device does, beside what the wheel gives it to do.

GPUs are read under dcgm-exporter's names, whether from dcgm-exporter or from Noria itself; where both tell of a GPU, it is shown once.
dcgm-exporter's label for the machine was renamed once, so that panels ask by `gpu` and `UUID` alone.
"""

from noria.dashboards.panels import Dashboard, Query, Row, stat, timeseries

_IN = 'instance=~"$instance"'


def _of_gpus(metric: str, legend: str = "GPU {{gpu}}") -> Query:
    """A figure of each GPU, once, whoever tells it."""
    return Query(f"max by (gpu, UUID) ({metric})", legend)


GPU = Dashboard(
    "noria-gpu",
    "Noria: GPU and engine",
    "What the device does, beside what the wheel gives it to do.",
    (
        Row(
            "Engine",
            (
                stat(
                    "Engines ready", "None is a reason to wake somebody.", f"sum(noria_engine_up{{{_IN}}}) or vector(0)"
                ),
                stat(
                    "Busy",
                    "Share of time in turns.",
                    f"sum(rate(noria_engine_busy_seconds_total{{{_IN}}}[1m])) / sum(noria_engine_up{{{_IN}}})",
                    unit="percentunit",
                ),
                stat("Turns/s", "Steps of the whole batch.", f"sum(rate(noria_turns_total{{{_IN}}}[1m]))"),
                stat("Image steps/s", "Steps of single images.", f"sum(rate(noria_denoise_steps_total{{{_IN}}}[1m]))"),
                stat(
                    "Mean batch",
                    "Images a turn.",
                    f"sum(rate(noria_batch_size_sum{{{_IN}}}[1m])) / sum(rate(noria_batch_size_count{{{_IN}}}[1m]))",
                ),
                stat(
                    "Restarts, 1 h",
                    "Engines that ended and were started again.",
                    f'sum(increase(noria_engine_starts_total{{{_IN},previous_end!="none"}}[1h]))',
                    alarm=1,
                ),
                stat(
                    "Out of memory, 1 h",
                    "Turns that did not fit; nobody failed by them.",
                    f"sum(increase(noria_out_of_memory_total{{{_IN}}}[1h]))",
                    alarm=1,
                ),
                stat(
                    "Memory held",
                    "By engines, on their devices.",
                    f"sum(noria_device_memory_bytes{{{_IN}}})",
                    unit="bytes",
                ),
            ),
        ),
        Row(
            "Comings and goings",
            (
                timeseries(
                    "Engines",
                    "Ready, and as many as there should be. A gap is a model that loads.",
                    Query(f"sum(noria_engine_up{{{_IN}}}) or vector(0)", "ready"),
                    Query(f"sum(noria_engines_configured{{{_IN}}})", "there should be"),
                ),
                timeseries(
                    "Engines that ended",
                    "In five minutes, by how: `crashed` is their own doing or a request's, `killed` somebody else's.",
                    Query(
                        f'sum by (previous_end) (increase(noria_engine_starts_total{{{_IN},previous_end!="none"}}[5m]))',
                        "{{previous_end}}",
                    ),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "GPU",
            (
                timeseries(
                    "Utilisation",
                    "Share of time in which any kernel ran: 100 % does not mean that it is full. And in which its memory was read or written.",
                    _of_gpus("DCGM_FI_DEV_GPU_UTIL"),
                    _of_gpus("DCGM_FI_DEV_MEM_COPY_UTIL", "memory of GPU {{gpu}}"),
                    unit="percent",
                ),
                timeseries(
                    "Memory",
                    "Framebuffer in use, and free.",
                    _of_gpus("DCGM_FI_DEV_FB_USED"),
                    _of_gpus("DCGM_FI_DEV_FB_FREE", "free of GPU {{gpu}}"),
                    unit="decmbytes",
                ),
                timeseries("Power", "Draw of the board.", _of_gpus("DCGM_FI_DEV_POWER_USAGE"), unit="watt"),
                timeseries("Temperature", "Of the GPU.", _of_gpus("DCGM_FI_DEV_GPU_TEMP"), unit="celsius"),
                timeseries("Clock", "Of the multiprocessors.", _of_gpus("DCGM_FI_DEV_SM_CLOCK"), unit="rotmhz"),
                timeseries(
                    "Energy an image",
                    "Joules: of all GPUs, over all images.",
                    Query(
                        "sum(max by (UUID) (rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m]))) / 1000 / sum(rate(noria_images_total[5m]))",
                        "J/image",
                    ),
                ),
            ),
        ),
    ),
)
