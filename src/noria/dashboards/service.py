"""Service: what callers feel, and what the wheel does about it."""

from noria.dashboards.panels import Dashboard, Panel, Query, Row, quantiles, stat, timeseries

_INSTANCE_FILTER = 'instance=~"$instance"'

_OVERVIEW_ROW = Row(
    "At a glance",
    (
        stat(
            "Images/s", "Sent to clients, over one minute.", f"sum(rate(noria_images_total{{{_INSTANCE_FILTER}}}[1m]))"
        ),
        stat(
            "Requests/s",
            "Answered, refused ones too.",
            f"sum(rate(noria_requests_total{{{_INSTANCE_FILTER}}}[1m]))",
            unit="reqps",
        ),
        stat(
            "p95",
            "95 % of the successful requests were quicker.",
            f"histogram_quantile(0.95, sum by (le) (rate(noria_request_seconds_bucket{{{_INSTANCE_FILTER}}}[5m])))",
            unit="s",
        ),
        stat(
            "Failures",
            "Share of requests that failed by the server's fault. Refusals are not among them.",
            f'sum(rate(noria_requests_total{{{_INSTANCE_FILTER},outcome=~"engine_lost|engine_crashed|generation_failed|internal"}}[5m]) or vector(0))'
            f" / (sum(rate(noria_requests_total{{{_INSTANCE_FILTER}}}[5m])) > 0)",
            unit="percentunit",
            alarm=0.01,
        ),
        stat(
            "Refused",
            "Share of requests refused because more was asked than can be drawn, or no engine was ready.",
            f'(sum(rate(noria_rejected_total{{{_INSTANCE_FILTER},reason=~"queue_full|deadline_unmeetable|engine_unavailable"}}[5m])) or vector(0))'
            f" / (sum(rate(noria_requests_total{{{_INSTANCE_FILTER}}}[5m])) > 0)",
            unit="percentunit",
            alarm=0.05,
        ),
        stat(
            "Wait of a newcomer",
            "Predicted time until all that was accepted is done. None while no engine is ready.",
            f"max(noria_queue_drain_seconds{{{_INSTANCE_FILTER}}})",
            unit="s",
            alarm=60,
        ),
        stat(
            "Engines missing",
            "Of those that there should be: they ended and start again, or cannot. Ready ones go on.",
            f"sum(noria_engines_configured{{{_INSTANCE_FILTER}}}) - sum(noria_engine_up{{{_INSTANCE_FILTER}}})",
            alarm=1,
        ),
        stat(
            "Engines busy",
            "Share of time in turns. Near 1 the device is full: more only makes everybody wait.",
            f"sum(rate(noria_engine_busy_seconds_total{{{_INSTANCE_FILTER}}}[1m])) / (sum(noria_engine_up{{{_INSTANCE_FILTER}}}) > 0)",
            unit="percentunit",
        ),
    ),
)

_LATENCY_ROW = Row(
    "Latency",
    (
        timeseries(
            "Requests",
            "From admission to encoded files; diamonds are single requests, with their id.",
            *quantiles("noria_request_seconds", _INSTANCE_FILTER),
            unit="s",
        ),
        timeseries(
            "Where the time goes",
            "Mean seconds of a request in each stage.",
            Query(
                f"sum by (stage) (rate(noria_stage_seconds_sum{{{_INSTANCE_FILTER}}}[5m])) / (sum by (stage) (rate(noria_stage_seconds_count{{{_INSTANCE_FILTER}}}[5m])) > 0)",
                "{{stage}}",
            ),
            unit="s",
            stacked=True,
        ),
        timeseries(
            "Waiting for a slot",
            "Of successful requests. Grows first when more is asked than can be drawn.",
            *quantiles("noria_queue_seconds", _INSTANCE_FILTER),
            unit="s",
        ),
        timeseries(
            "A step",
            "Median time of a turn, by size: how fast the device is with the batch that it has.",
            *quantiles("noria_step_seconds", _INSTANCE_FILTER, by="shape", probabilities=(0.5,)),
            unit="s",
        ),
    ),
)

_TRAFFIC_ROW = Row(
    "Traffic",
    (
        timeseries(
            "Requests by outcome",
            "`ok`, or the code of the error that callers got.",
            Query(f"sum by (outcome) (rate(noria_requests_total{{{_INSTANCE_FILTER}}}[1m]))", "{{outcome}}"),
            unit="reqps",
            stacked=True,
        ),
        timeseries(
            "Images by model",
            "Sent to clients.",
            Query(f"sum by (model) (rate(noria_images_total{{{_INSTANCE_FILTER}}}[1m]))", "{{model}}"),
            stacked=True,
        ),
        timeseries(
            "In flight",
            "Requests being worked on, waiting ones too; and open pages and terminals that show the wheels.",
            Query(f"sum(noria_inflight{{{_INSTANCE_FILTER}}})", "requests"),
            Query(f"sum(noria_live_watchers{{{_INSTANCE_FILTER}}})", "who watch the wheels"),
        ),
        timeseries(
            "Refused by reason",
            "`queue_full` and `deadline_unmeetable`: more is asked than can be drawn; the rest is what callers did wrong, or no engine.",
            Query(f"sum by (reason) (rate(noria_rejected_total{{{_INSTANCE_FILTER}}}[1m]))", "{{reason}}"),
            unit="reqps",
            stacked=True,
        ),
        timeseries(
            "Deadlines missed",
            "Requests that were accepted with a deadline and not answered by it; none, while promises are kept.",
            Query(f"sum(rate(noria_deadline_missed_total{{{_INSTANCE_FILTER}}}[5m])) or vector(0)", "missed"),
            unit="reqps",
        ),
        timeseries(
            "HTTP by status",
            "Every route. 499: the client left first.",
            Query(f"sum by (status) (rate(noria_http_requests_total{{{_INSTANCE_FILTER}}}[1m]))", "{{status}}"),
            unit="reqps",
            stacked=True,
        ),
    ),
)

_RUNNING_BATCH_ROW = Row(
    "The wheel",
    (
        timeseries(
            "Slots",
            "A full wheel draws most images a second; a queue beside free slots would be a fault.",
            Query(f"sum(noria_slots_used{{{_INSTANCE_FILTER}}})", "used"),
            Query(f"sum(noria_slots{{{_INSTANCE_FILTER}}})", "there are"),
            Query(f"sum(noria_queue_depth{{{_INSTANCE_FILTER}}})", "waiting"),
        ),
        Panel(
            "Batch",
            (Query(f"sum by (le) (increase(noria_batch_size_bucket{{{_INSTANCE_FILTER}}}[1m]))", "{{le}}"),),
            "How many images each turn had.",
            kind="heatmap",
        ),
        timeseries(
            "Boarding and leaving",
            "Images a second. Nothing waits for company: both are smooth.",
            Query(f"sum(rate(noria_joins_total{{{_INSTANCE_FILTER}}}[1m]))", "board"),
            Query(f"sum(rate(noria_leaves_total{{{_INSTANCE_FILTER}}}[1m]))", "leave"),
        ),
        timeseries(
            "Oldest in the queue",
            "How long ago the oldest request that waits for a slot came.",
            Query(f"max(noria_oldest_age_seconds{{{_INSTANCE_FILTER}}})", "age"),
            unit="s",
        ),
    ),
)

_JOBS_ROW = Row(
    "Jobs",
    (
        timeseries(
            "Jobs",
            "Accepted, and ended by how.",
            Query(f"sum(rate(noria_jobs_accepted_total{{{_INSTANCE_FILTER}}}[5m]))", "accepted"),
            Query(f"sum by (status) (rate(noria_jobs_total{{{_INSTANCE_FILTER}}}[5m]))", "{{status}}"),
        ),
        timeseries(
            "Webhooks",
            "Attempts to deliver them; what failed is tried again.",
            Query(f"sum by (outcome) (rate(noria_webhooks_total{{{_INSTANCE_FILTER}}}[5m]))", "{{outcome}}"),
        ),
    ),
)

SERVICE = Dashboard(
    "noria-service",
    "Noria: service",
    "What callers feel, and what the wheel does about it.",
    (_OVERVIEW_ROW, _LATENCY_ROW, _TRAFFIC_ROW, _RUNNING_BATCH_ROW, _JOBS_ROW),
)
