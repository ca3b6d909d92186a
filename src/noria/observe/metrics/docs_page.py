"""docs/metrics.md, generated from the declarations; `make docs` writes it and a test compares."""

import itertools

from noria.observe.metrics.declarations import DECLARATIONS
from noria.observe.metrics.section import Declaration

_INTRODUCTION = """# Metrics

`GET /metrics` of any front end returns every metric of the server, summed over its front ends and
engines: OpenMetrics with exemplars if the scraper asks for it, as Prometheus does, and Prometheus'
text format otherwise. The counts of ended processes are kept. An exemplar is the `request_id` of
the latest request in a bucket that this front end served, and its `trace_id` if its trace is
recorded; the Grafana of `deploy/` links from there to the [trace](traces.md). With a `request_id`
longer than 78 characters only the `trace_id` is kept.

`make docs` writes this page from `src/noria/observe/metrics/declarations.py`. Units are in the
names.

Labels are bounded:

- `model` is a model that is served, or `other` for requests that name another or came before any
  engine was ready.
- `outcome` is `ok` or a code of [errors.md](errors.md), and `reason` is such a code.
- `path` is a route's template or `other`; `method` is an HTTP method or `other`.
- `shape` is one of the first 32 image sizes generated, or `other`.
- `engine` is `engine-0`, `engine-1` …, as in the log, `GET /v1/live` and traces.

A restarted engine continues its counters. Gauges exist only for running engines: while an engine
loads, and after it has ended, its `noria_engine_up` is 0 and its other gauges are absent.
"""

QUERIES = {
    "Images per second": "sum(rate(noria_images_total[1m]))",
    "95th percentile of a request's time": "histogram_quantile(0.95, "
    "sum by (le) (rate(noria_request_seconds_bucket[5m])))",
    "Mean batch size": "sum(rate(noria_batch_size_sum[1m])) / (sum(rate(noria_batch_size_count[1m])) > 0)",
    "Mean batch size of each engine": "rate(noria_batch_size_sum[1m]) / (rate(noria_batch_size_count[1m]) > 0)",
    "Utilisation of all engines": "sum(rate(noria_engine_busy_seconds_total[1m])) / (sum(noria_engine_up) > 0)",
    "Utilisation of each engine": "rate(noria_engine_busy_seconds_total[1m])",
    "Mean iteration time of each engine": "rate(noria_engine_busy_seconds_total[5m]) / "
    "(rate(noria_iterations_total[5m]) > 0)",
    "Requests rejected because the queue is full, per second": "sum("
    'rate(noria_rejected_total{reason="queue_full"}[1m]))',
    "Share of all requests that were accepted and missed their deadline": "sum(rate(noria_deadline_missed_total[5m]))"
    " / (sum(rate(noria_requests_total[5m])) > 0)",
    "Predicted wait of a new request": "max(noria_backlog_seconds)",
    "Number of engines that are not ready": "sum(noria_engines_configured) - sum(noria_engine_up)",
    "Which engines are not ready": "noria_engine_up == 0",
    "Which engines crashed or were killed": "sum by (instance, engine) "
    '(increase(noria_engine_starts_total{previous_exit!="none"}[15m])) > 0',
    "Which front ends restart repeatedly": "sum by (instance, process) "
    '(increase(noria_frontend_starts_total{cause="restarted"}[15m])) > 2.5',
    "Which engines ran out of device memory": "sum by (instance, engine) "
    "(increase(noria_out_of_memory_total[15m])) > 0",
}
"""Questions, and the PromQL queries that answer them."""


def metrics_page() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for section, declarations in itertools.groupby(DECLARATIONS.values(), key=lambda each: each.section):
        parts += [f"\n## {section}\n", "| Metric | Kind | Labels | Meaning |\n|---|---|---|---|"]
        parts += [_row(each) for each in declarations]
    parts += ["\n## Buckets\n", "| Metrics | Upper bounds |\n|---|---|"]
    names: dict[tuple[float, ...], list[str]] = {}
    for each in DECLARATIONS.values():
        if each.buckets:
            names.setdefault(tuple(each.buckets), []).append(f"`{each.name}`")
    parts += [
        f"| {', '.join(with_them)} | {', '.join(f'{b:g}' for b in bounds)} |" for bounds, with_them in names.items()
    ]
    parts += ["\n## Questions and their queries\n", "| Question | PromQL |\n|---|---|"]
    parts += [f"| {question} | `{query}` |" for question, query in QUERIES.items()]
    return "\n".join(parts) + "\n"


def _row(declaration: Declaration) -> str:
    labels = ", ".join(f"`{label}`" for label in declaration.labels)
    return f"| `{declaration.name}` | {declaration.kind} | {labels} | {declaration.help} |"
