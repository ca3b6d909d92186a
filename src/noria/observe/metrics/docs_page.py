"""docs/metrics.md, from the declarations; `make docs` writes it and a test compares."""

import itertools

from noria.observe.metrics.declarations import DECLARATIONS, Declaration

_INTRODUCTION = """# Metrics

`GET /metrics` of any front end gives every metric of the server, summed over its front ends and engines: OpenMetrics with exemplars to whom
asks for it, as Prometheus does, and Prometheus' text format to others. What a process that has ended counted still counts. An exemplar is the
`request_id` of the latest request in a bucket, as that front end knows it, and its `trace_id` if its trace is recorded; Grafana of
`deploy/` leads from there to the [trace](traces.md). OpenMetrics has room for 128 characters, so where a caller's `request_id` is longer
than 78, the `trace_id` stands alone: the lines of the log have both.

Written by `make docs` from `src/noria/observe/metrics/declarations.py`, where each is declared once.

Labels are bounded: `model` is a model served, or `other` of requests that name another or came before any engine was ready; `outcome` is
`ok` or a code of [errors.md](errors.md) and `reason` one of them, `path` is a route's template or `other`, `method` is one of HTTP's or `other`, `shape` is one of the first 32 sizes drawn or `other`,
`engine` is one for each device: `engine-0`, `engine-1` …, as in the log, in `GET /v1/live` and in traces.

An engine's counters go on in its next life. Its gauges are of the living: while it loads, and after it has ended, `noria_engine_up` of it is 0
and its other gauges are not there. How long its turns take is `noria_engine_busy_seconds_total` over `noria_turns_total`; by size it is told of
all engines together (`noria_step_seconds`).
"""

QUERIES = {
    "Images per second": "sum(rate(noria_images_total[1m]))",
    "95th percentile of a request's time": "histogram_quantile(0.95, sum by (le) (rate(noria_request_seconds_bucket[5m])))",
    "Mean batch": "sum(rate(noria_batch_size_sum[1m])) / (sum(rate(noria_batch_size_count[1m])) > 0)",
    "Mean batch of each engine": "rate(noria_batch_size_sum[1m]) / (rate(noria_batch_size_count[1m]) > 0)",
    "Share of time that engines work": "sum(rate(noria_engine_busy_seconds_total[1m])) / (sum(noria_engine_up) > 0)",
    "Share of time that each engine works": "rate(noria_engine_busy_seconds_total[1m])",
    "How long each engine's turns take": "rate(noria_engine_busy_seconds_total[5m]) / (rate(noria_turns_total[5m]) > 0)",
    "Refused because full": 'sum(rate(noria_rejected_total{reason="queue_full"}[1m]))',
    "Deadlines missed, a request, refused ones and those without a deadline too": "sum(rate(noria_deadline_missed_total[5m])) / (sum(rate(noria_requests_total[5m])) > 0)",
    "How long who comes now will wait": "max(noria_queue_drain_seconds)",
    "How many engines are missing": "sum(noria_engines_configured) - sum(noria_engine_up)",
    "Which": "noria_engine_up == 0",
    "Which engines crashed or were killed": 'sum by (instance, engine) (increase(noria_engine_starts_total{previous_end!="none"}[15m])) > 0',
    "Which front ends end again and again": "sum by (instance, process) (increase(noria_frontend_starts_total[15m])) > 2.5",
    "Which engines' memory was too small": "sum by (instance, engine) (increase(noria_out_of_memory_total[15m])) > 0",
}
"""Questions and what answers them."""


def metrics_page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for section, declarations in itertools.groupby(DECLARATIONS.values(), key=lambda each: each.section):
        parts += [f"\n## {section}\n", "| Metric | Kind | Unit | Labels | Meaning |\n|---|---|---|---|---|"]
        parts += [_row(each) for each in declarations]
    parts += ["\n## Buckets\n", "| Metric | Upper bounds |\n|---|---|"]
    parts += [
        f"| `{each.name}` | {', '.join(f'{upper_bound:g}' for upper_bound in each.buckets)} |"
        for each in DECLARATIONS.values()
        if each.buckets
    ]
    parts += ["\n## Questions and their queries\n", "| Question | PromQL |\n|---|---|"]
    parts += [f"| {question} | `{query}` |" for question, query in QUERIES.items()]
    return "\n".join(parts) + "\n"


def _row(declaration: Declaration) -> str:
    labels = ", ".join(f"`{label}`" for label in declaration.labels)
    return f"| `{declaration.name}` | {declaration.kind} | {declaration.unit} | {labels} | {declaration.help} |"
