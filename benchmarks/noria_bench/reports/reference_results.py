"""The results of the reference article, as it prints them.

Javier Mermet, "Universe Scale Serving of Generative Models. And Why You Might Not Want To Use FastAPI For That
Purpose", 12 April 2023. Stable Diffusion, 512 × 512 px, 20 steps, guidance 8.2; a g4dn.xlarge of AWS: one Tesla T4 (16
GB), 4 vCPUs; Locust; no failures.

The ablation's check marks (which row has memory-efficient attention, which attention slicing) are missing in the
English text and present in the Spanish one ("Optimizaciones de transformadores": both, neither, slicing alone,
memory-efficient alone). The English text confirms two of the four: the first row equals scenario 2's batched endpoint,
and the last equals the batching table's first row, "enabling memory efficient attention and disabling attention
slicing".
"""

from dataclasses import dataclass

CITATION = (
    "Javier Mermet, “Universe Scale Serving of Generative Models”, 12 April 2023: Stable Diffusion at 512 × 512 px, "
    "20 steps, guidance 8.2, on one Tesla T4 (g4dn.xlarge), by Locust; no failures"
)
# Length of every run of the article.
SECONDS = 900.0


@dataclass(frozen=True)
class ReferenceRow:
    """A row of a table; the article has the last two columns in a separate table, for some tables only."""

    num_requests: int
    avg_ms: float
    requests_per_s: float  # as printed; `num_requests / SECONDS` is more precise
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    gpu_memory: float | None = None  # shares of 1, means
    gpu_utilisation: float | None = None


SCENARIOS: dict[str, dict[str, ReferenceRow]] = {
    "scenario1": {
        "reference-stream-async": ReferenceRow(218, 4112, 0.2, 4100, 4200, 4200, 4200, 0.806, 0.688),
        "reference-response-async": ReferenceRow(230, 3912, 0.3, 3900, 4000, 4000, 4000, 0.608, 0.593),
        "reference-stream-sync": ReferenceRow(226, 3978, 0.3, 4000, 4000, 4000, 4200, 0.597, 0.710),
        "reference-response-sync": ReferenceRow(236, 3811, 0.3, 3800, 4000, 4000, 4000, 0.585, 0.631),
        "reference-batched": ReferenceRow(368, 2439, 0.4, 2400, 2400, 2400, 2400, 0.751, 0.428),
    },
    "scenario2": {
        "reference-stream-async": ReferenceRow(261, 21951, 0.3, 26000, 28000, 34000, 46000, 0.877, 0.921),
        "reference-response-async": ReferenceRow(269, 20875, 0.3, 9900, 53000, 56000, 69000, 0.842, 0.919),
        "reference-stream-sync": ReferenceRow(264, 21618, 0.3, 26000, 32000, 34000, 46000, 0.906, 0.936),
        "reference-response-sync": ReferenceRow(270, 20729, 0.3, 9800, 56000, 59000, 65000, 0.602, 0.877),
        "reference-batched": ReferenceRow(975, 5923, 1.1, 6400, 6500, 6500, 12000, 0.713, 0.803),
    },
}

ATTENTION = {
    "memory-efficient, sliced": ReferenceRow(975, 5923, 1.1, 6400, 6500, 6500, 12000, 0.713, 0.803),
    "neither": ReferenceRow(932, 6200, 1.0, 6900, 7000, 7000, 11000, 0.727, 0.874),
    "sliced": ReferenceRow(957, 6040, 1.1, 6500, 6700, 6800, 13000, 0.639, 0.825),
    "memory-efficient": ReferenceRow(1131, 5102, 1.3, 5300, 5800, 5800, 8800, 0.499, 0.838),
}

# With the settings of the ablation's best row.
CHANNELS_LAST = {"off": ATTENTION["memory-efficient"], "on": ReferenceRow(1316, 4383, 1.5, 4800, 5100, 5300, 5400)}

# (timeout in ms, images)
BATCHING: dict[tuple[int, int], ReferenceRow] = {
    (500, 8): ReferenceRow(1131, 5102, 1.3, 5300, 5800, 5800, 8800),
    (250, 8): ReferenceRow(1121, 5145, 1.2, 5400, 6000, 6000, 9700),
    (1000, 8): ReferenceRow(1030, 5599, 1.1, 5900, 6000, 6000, 12000),
    (500, 4): ReferenceRow(1083, 5331, 1.2, 5900, 5900, 5900, 8200),
    (500, 16): ReferenceRow(1051, 5506, 1.2, 6000, 6100, 6100, 12000),
}


def scenario_rows(bench: str) -> dict[str, ReferenceRow]:
    """The article's rows by target; empty if it has no such scenario."""
    return SCENARIOS.get(bench, {})


def sweep_rows(bench: str) -> dict[str, ReferenceRow]:
    """The rows of the article's table on the subject of a sweep, found by its name; empty without one."""
    if "attention" in bench:
        return ATTENTION
    if "channels" in bench:
        return CHANNELS_LAST
    if "batch" in bench:
        return {f"{timeout_ms} ms, {size}": row for (timeout_ms, size), row in BATCHING.items()}
    return {}
