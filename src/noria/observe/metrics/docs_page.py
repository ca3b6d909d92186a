"""docs/metrics.md, generated from the declarations; `make docs` writes it and a test compares."""

import itertools

from noria.observe.metrics.declarations import DECLARATIONS
from noria.observe.metrics.section import Declaration

_INTRODUCTION = """# Metrics

`GET /metrics` of any front end returns every metric of the server, summed over its processes, ended
ones included: OpenMetrics with exemplars if the scraper asks for it, as Prometheus does, and
Prometheus' text format otherwise. An exemplar is the `request_id` of the latest request in a bucket
that this front end served, and the `trace_id` of its [trace](traces.md), if that is recorded; of a
`request_id` longer than 78 characters only the `trace_id` is kept.

`make docs` writes this page from `src/noria/observe/metrics/declarations.py`. Units are in the
names. Gauges of an engine exist only while it is ready: else its `noria_engine_up` is 0.

| Label | Values |
|---|---|
| `model` | a model that is served, or `other` for requests that name another or came before any engine was ready |
| `outcome`, `reason` | `ok`, a code of [errors.md](errors.md) |
| `path`, `method` | a route's template, an HTTP method, or `other` |
| `shape` | one of the first 32 image sizes generated, or `other` |
| `engine`, `process` | `engine-0`, `frontend-0` …, as in the log |
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
        parts += [f"\n## {section}\n", "| Metric | Kind | Meaning |\n|---|---|---|"]
        parts += [_row(each) for each in declarations]
    parts.append("\n## Buckets\n\n`GET /metrics` shows those of `noria_stat_…`, which settings can change.\n")
    parts.append("| Metrics | Upper bounds |\n|---|---|")
    names: dict[tuple[float, ...], list[str]] = {}
    for each in DECLARATIONS.values():
        if each.buckets and not each.name.startswith("noria_stat_"):
            names.setdefault(tuple(each.buckets), []).append(f"`{each.name}`")
    parts += [
        f"| {', '.join(with_them)} | {', '.join(f'{b:g}' for b in bounds)} |" for bounds, with_them in names.items()
    ]
    parts += ["\n## Questions and their queries\n", "| Question | PromQL |\n|---|---|"]
    parts += [f"| {question} | `{query}` |" for question, query in QUERIES.items()]
    return "\n".join(parts) + "\n"


def _row(declaration: Declaration) -> str:
    labels = f" `{{{','.join(declaration.labels)}}}`" if declaration.labels else ""
    return f"| `{declaration.name}`{labels} | {declaration.kind} | {declaration.help} |"
