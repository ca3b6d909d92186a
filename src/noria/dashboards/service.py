"""Dashboard "Service": what clients experience, and the state of queue and batch that explains it."""

from noria.dashboards.panels import Dashboard, Panel, Query, Row, quantiles, stat, timeseries

_INSTANCE_FILTER = 'instance=~"$instance"'

_OVERVIEW_ROW = Row(
    "Overview",
    (
        stat(
            "Images/s", "Sent to clients, over one minute.", f"sum(rate(noria_images_total{{{_INSTANCE_FILTER}}}[1m]))"
        ),
        stat(
            "Requests/s",
            "Answered, including rejected ones.",
            f"sum(rate(noria_requests_total{{{_INSTANCE_FILTER}}}[1m]))",
            unit="reqps",
        ),
        stat(
            "p95",
            "95 % of the successful requests were faster.",
            f"histogram_quantile(0.95, sum by (le) (rate(noria_request_seconds_bucket{{{_INSTANCE_FILTER}}}[5m])))",
            unit="s",
        ),
        stat(
            "Failures",
            "Share of requests that failed because of the server. Rejected requests are not included.",
            f"sum(rate(noria_requests_total{{{_INSTANCE_FILTER},"
            'outcome=~"engine_lost|engine_crashed|generation_failed|internal"}[5m]) or vector(0))'
            f" / (sum(rate(noria_requests_total{{{_INSTANCE_FILTER}}}[5m])) > 0)",
            unit="percentunit",
            threshold=0.01,
        ),
        stat(
            "Rejected",
            "Share of requests rejected because of overload, or because no engine was ready.",
            f"(sum(rate(noria_rejected_total{{{_INSTANCE_FILTER},"
            'reason=~"queue_full|deadline_unmeetable|engine_unavailable"}[5m])) or vector(0))'
            f" / (sum(rate(noria_requests_total{{{_INSTANCE_FILTER}}}[5m])) > 0)",
            unit="percentunit",
            threshold=0.05,
        ),
        stat(
            "Predicted backlog",
            "Predicted time until all accepted requests are done. No value while no engine is ready.",
            f"max(noria_backlog_seconds{{{_INSTANCE_FILTER}}})",
            unit="s",
            threshold=60,
        ),
        stat(
            "Engines missing",
            "Configured engines that are not ready: they are loading or have ended. The others work.",
            f"sum(noria_engines_configured{{{_INSTANCE_FILTER}}}) - sum(noria_engine_up{{{_INSTANCE_FILTER}}})",
            threshold=1,
        ),
        stat(
            "Engines busy",
            "Share of time in iterations. Near 1 the devices are saturated: more load only adds waiting time.",
            f"sum(rate(noria_engine_busy_seconds_total{{{_INSTANCE_FILTER}}}[1m])) / "
            f"(sum(noria_engine_up{{{_INSTANCE_FILTER}}}) > 0)",
            unit="percentunit",
        ),
    ),
)

_LATENCY_ROW = Row(
    "Latency",
    (
        timeseries(
            "Requests",
            "From admission to encoded files. Diamonds are exemplars: single requests with their id.",
            *quantiles("noria_request_seconds", _INSTANCE_FILTER),
            unit="s",
        ),
        timeseries(
            "Time by stage",
            "Mean time of a request in each stage.",
            Query(
                f"sum by (stage) (rate(noria_stage_seconds_sum{{{_INSTANCE_FILTER}}}[5m])) / "
                f"(sum by (stage) (rate(noria_stage_seconds_count{{{_INSTANCE_FILTER}}}[5m])) > 0)",
                "{{stage}}",
            ),
            unit="s",
            stacked=True,
        ),
        timeseries(
            "Wait for a slot",
            "Of successful requests. Under overload it grows first.",
            *quantiles("noria_queue_seconds", _INSTANCE_FILTER),
            unit="s",
        ),
        timeseries(
            "Iteration time",
            "Median time of an iteration, by image size.",
            *quantiles("noria_iteration_seconds", _INSTANCE_FILTER, by="shape", probabilities=(0.5,)),
            unit="s",
        ),
    ),
)

_TRAFFIC_ROW = Row(
    "Traffic",
    (
        timeseries(
            "Requests by outcome",
            "`ok`, or the error code in the response.",
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
            "Texts by model",
            "Whose results were sent to clients.",
            Query(f"sum by (model) (rate(noria_texts_total{{{_INSTANCE_FILTER}}}[1m]))", "{{model}}"),
            stacked=True,
        ),
        timeseries(
            "Tokens",
            "Computed by text encoders: those of texts, and padding to the longest text of a batch.",
            Query(f"sum(rate(noria_tokens_total{{{_INSTANCE_FILTER}}}[1m])) or vector(0)", "tokens"),
            Query(f"sum(rate(noria_padding_tokens_total{{{_INSTANCE_FILTER}}}[1m])) or vector(0)", "padding"),
            stacked=True,
        ),
        timeseries(
            "Time of a batch of texts",
            "Mean, by the number of its texts.",
            Query(
                f"sum by (texts) (rate(noria_text_batch_seconds_total{{{_INSTANCE_FILTER}}}[5m])) / "
                f"(sum by (texts) (rate(noria_text_batches_total{{{_INSTANCE_FILTER}}}[5m])) > 0)",
                "{{texts}}",
            ),
            unit="s",
        ),
        timeseries(
            "Fidelity of text encoders",
            "How near their results are to float32's, by precision; 1 is equal.",
            Query(f"max by (model, dtype) (noria_encoder_fidelity_ratio{{{_INSTANCE_FILTER}}})", "{{model}} {{dtype}}"),
        ),
        timeseries(
            "In flight",
            "Requests in progress, including waiting ones; and pages and terminals with a live view.",
            Query(f"sum(noria_requests_in_flight{{{_INSTANCE_FILTER}}})", "requests"),
            Query(f"sum(noria_live_subscribers{{{_INSTANCE_FILTER}}})", "live subscribers"),
        ),
        timeseries(
            "Rejected by reason",
            "`queue_full` and `deadline_unmeetable`: overload. The others: invalid requests, or no engine is ready.",
            Query(f"sum by (reason) (rate(noria_rejected_total{{{_INSTANCE_FILTER}}}[1m]))", "{{reason}}"),
            unit="reqps",
            stacked=True,
        ),
        timeseries(
            "Deadlines missed",
            "Requests that were accepted with a deadline and not answered in time. Normally 0.",
            Query(f"sum(rate(noria_deadline_missed_total{{{_INSTANCE_FILTER}}}[5m])) or vector(0)", "missed"),
            unit="reqps",
        ),
        timeseries(
            "HTTP by status",
            "All routes. 499: the client disconnected first.",
            Query(f"sum by (status) (rate(noria_http_requests_total{{{_INSTANCE_FILTER}}}[1m]))", "{{status}}"),
            unit="reqps",
            stacked=True,
        ),
    ),
)

_RUNNING_BATCH_ROW = Row(
    "Running batch",
    (
        timeseries(
            "Slots",
            "Throughput is highest with all slots in use. Images that wait while slots are free would be a bug.",
            Query(f"sum(noria_slots_used{{{_INSTANCE_FILTER}}})", "used"),
            Query(f"sum(noria_slots{{{_INSTANCE_FILTER}}})", "available"),
            Query(f"sum(noria_queue_depth{{{_INSTANCE_FILTER}}})", "waiting"),
        ),
        Panel(
            "Batch size",
            (Query(f"sum by (le) (increase(noria_batch_size_bucket{{{_INSTANCE_FILTER}}}[1m]))", "{{le}}"),),
            "Distribution of the number of images per iteration.",
            kind="heatmap",
        ),
        timeseries(
            "Joins and departures",
            "Images per second that join and leave the batch. Images join at any iteration, so both are smooth. An "
            "engine that ends, or has much more to do than another one, hands over images: they join another one, or "
            "begin anew.",
            Query(f"sum(rate(noria_joins_total{{{_INSTANCE_FILTER}}}[1m]))", "joins"),
            Query(f"sum(rate(noria_departures_total{{{_INSTANCE_FILTER}}}[1m]))", "departures"),
            Query(
                f"sum by (outcome, reason) (rate(noria_images_moved_total{{{_INSTANCE_FILTER}}}[1m]))",
                "handed over, {{reason}}: {{outcome}}",
            ),
        ),
        timeseries(
            "Oldest request in the queue",
            "Age of the oldest request that waits for a slot.",
            Query(f"max(noria_queue_oldest_age_seconds{{{_INSTANCE_FILTER}}})", "age"),
            unit="s",
        ),
    ),
)

_JOBS_ROW = Row(
    "Jobs",
    (
        timeseries(
            "Jobs",
            "Jobs accepted, and jobs ended by status.",
            Query(f"sum(rate(noria_jobs_accepted_total{{{_INSTANCE_FILTER}}}[5m]))", "accepted"),
            Query(f"sum by (status) (rate(noria_jobs_total{{{_INSTANCE_FILTER}}}[5m]))", "{{status}}"),
        ),
        timeseries(
            "Webhooks",
            "Delivery attempts by outcome. Failed ones are retried.",
            Query(f"sum by (outcome) (rate(noria_webhook_attempts_total{{{_INSTANCE_FILTER}}}[5m]))", "{{outcome}}"),
        ),
    ),
)

_DEPLOYMENTS_ROW = Row(
    "Deployments",
    (
        timeseries(
            "Requests by version",
            "To deployed versions. While an endpoint has a canary, it has two.",
            Query(
                f"sum by (model, version) (rate(noria_deployment_requests_total{{{_INSTANCE_FILTER}}}[1m]))",
                "{{model}} {{version}}",
            ),
            unit="reqps",
            stacked=True,
        ),
        timeseries(
            "Failures by version",
            "Share of the requests that failed because of the server.",
            Query(
                f"(sum by (model, version) (rate(noria_deployment_requests_total{{{_INSTANCE_FILTER},"
                'outcome=~"engine_lost|engine_crashed|generation_failed|internal"}[5m]))'
                f" or 0 * sum by (model, version) (rate(noria_deployment_requests_total{{{_INSTANCE_FILTER}}}[5m]))) / "
                f"(sum by (model, version) (rate(noria_deployment_requests_total{{{_INSTANCE_FILTER}}}[5m])) > 0)",
                "{{model}} {{version}}",
            ),
            unit="percentunit",
        ),
        timeseries(
            "Time by version",
            "95 % of the successful requests were faster.",
            Query(
                "histogram_quantile(0.95, sum by (le, model, version) "
                f"(rate(noria_deployment_request_seconds_bucket{{{_INSTANCE_FILTER}}}[5m])))",
                "{{model}} {{version}}",
            ),
            unit="s",
        ),
        timeseries(
            "Canary's share",
            "Of the requests to its endpoint.",
            Query(f"max by (model, version) (noria_canary_share_ratio{{{_INSTANCE_FILTER}}})", "{{model}} {{version}}"),
            unit="percentunit",
        ),
        timeseries(
            "Evidence against the canary",
            "It is rolled back at 20, unless its deployment says otherwise.",
            Query(f"max by (model, version) (noria_canary_evidence{{{_INSTANCE_FILTER}}})", "{{model}} {{version}}"),
        ),
        timeseries(
            "Copies for the shadow",
            "`dropped`: not computed, because requests were waiting.",
            Query(
                f"sum by (version, outcome) (rate(noria_shadow_requests_total{{{_INSTANCE_FILTER}}}[1m]))",
                "{{version}} {{outcome}}",
            ),
            unit="reqps",
            stacked=True,
        ),
        timeseries(
            "Computing time of copied requests",
            "Mean, by the shadow and by the control.",
            Query(
                f"sum by (version, arm) (rate(noria_shadow_seconds_sum{{{_INSTANCE_FILTER}}}[5m])) / "
                f"(sum by (version, arm) (rate(noria_shadow_seconds_count{{{_INSTANCE_FILTER}}}[5m])) > 0)",
                "{{version}} {{arm}}",
            ),
            unit="s",
        ),
        timeseries(
            "Distance of the shadow",
            "95 % of its outputs were nearer to the control's.",
            Query(
                "histogram_quantile(0.95, sum by (le, version) "
                f"(rate(noria_shadow_distance_bucket{{{_INSTANCE_FILTER}}}[5m])))",
                "{{version}}",
            ),
        ),
    ),
)

_ENDPOINTS_ROW = Row(
    "Endpoints with code of your own",
    (
        timeseries(
            "Requests by endpoint",
            "`ok`, or the error code in the response.",
            Query(
                f"sum by (endpoint, outcome) (rate(noria_endpoint_requests_total{{{_INSTANCE_FILTER}}}[1m]))",
                "{{endpoint}} {{outcome}}",
            ),
            unit="reqps",
            stacked=True,
        ),
        timeseries(
            "Time of the code",
            "Mean time of a call, with the calls that it makes.",
            Query(
                f"sum by (endpoint, method) (rate(noria_user_code_seconds_sum{{{_INSTANCE_FILTER}}}[5m])) / "
                f"(sum by (endpoint, method) (rate(noria_user_code_seconds_count{{{_INSTANCE_FILTER}}}[5m])) > 0)",
                "{{endpoint}} {{method}}",
            ),
            unit="s",
        ),
        timeseries(
            "Stuck threads",
            "In calls that have exceeded their time limit. When all are, calls are rejected.",
            Query(f"sum(noria_user_code_stuck_threads{{{_INSTANCE_FILTER}}})", "stuck"),
        ),
    ),
)

SERVICE = Dashboard(
    "noria-service",
    "Noria: service",
    "What clients experience, and the state of queue and batch that explains it.",
    (_OVERVIEW_ROW, _LATENCY_ROW, _TRAFFIC_ROW, _RUNNING_BATCH_ROW, _JOBS_ROW, _DEPLOYMENTS_ROW, _ENDPOINTS_ROW),
)
