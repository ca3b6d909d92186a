"""Dashboard "Service": what clients experience, and the state of queue and batch that explains it."""

from noria.dashboards.panels import Dashboard, Panel, mean, quantiles, query, row, stat, timeseries

_OVERVIEW_ROW = row(
    "Overview",
    stat("Images/s", "Sent to clients, over one minute.", "sum(rate(noria_images_total[1m]))"),
    stat("Requests/s", "Answered, including rejected ones.", "sum(rate(noria_requests_total[1m]))", unit="reqps"),
    stat(
        "p95",
        "95 % of the successful requests were faster.",
        "histogram_quantile(0.95, sum by (le) (rate(noria_request_seconds_bucket[5m])))",
        unit="s",
    ),
    stat(
        "Failures",
        "Share of requests that failed because of the server. Rejected requests are not included.",
        "sum(rate(noria_requests_total{"
        'outcome=~"engine_lost|engine_crashed|generation_failed|internal"}[5m]) or vector(0))'
        " / (sum(rate(noria_requests_total[5m])) > 0)",
        unit="percentunit",
        threshold=0.01,
    ),
    stat(
        "Rejected",
        "Share of requests rejected because of overload, or because no engine was ready.",
        "(sum(rate(noria_rejected_total{"
        'reason=~"queue_full|deadline_unmeetable|engine_unavailable"}[5m])) or vector(0))'
        " / (sum(rate(noria_requests_total[5m])) > 0)",
        unit="percentunit",
        threshold=0.05,
    ),
    stat(
        "Predicted backlog",
        "Predicted time until all accepted requests are done. No value while no engine is ready.",
        "max(noria_backlog_seconds)",
        unit="s",
        threshold=60,
    ),
    stat(
        "Engines missing",
        "Configured engines that are not ready: they are loading or have ended. The others work.",
        "sum(noria_engines_configured) - sum(noria_engine_up)",
        threshold=1,
    ),
    stat(
        "Engines busy",
        "Share of time in iterations. Near 1 the devices are saturated: more load only adds waiting time.",
        "sum(rate(noria_engine_busy_seconds_total[1m])) / (sum(noria_engine_up) > 0)",
        unit="percentunit",
    ),
)

_LATENCY_ROW = row(
    "Latency",
    timeseries(
        "Requests",
        "From admission to encoded files. Diamonds are exemplars: single requests with their id.",
        *quantiles("noria_request_seconds"),
        unit="s",
    ),
    timeseries(
        "Time by stage",
        "Mean time of a request in each stage.",
        mean("noria_stage_seconds_sum", "noria_stage_seconds_count", "stage"),
        unit="s",
        stacked=True,
    ),
    timeseries(
        "Wait for a slot",
        "Of successful requests. Under overload it grows first.",
        *quantiles("noria_queue_seconds"),
        unit="s",
    ),
    timeseries(
        "Iteration time",
        "Median time of an iteration, by image size.",
        *quantiles("noria_iteration_seconds", by="shape", probabilities=(0.5,)),
        unit="s",
    ),
)

_TRAFFIC_ROW = row(
    "Traffic",
    timeseries(
        "Requests by outcome",
        "`ok`, or the error code in the response.",
        query("sum by (outcome) (rate(noria_requests_total[1m]))", "{{outcome}}"),
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Images by model",
        "Sent to clients.",
        query("sum by (model) (rate(noria_images_total[1m]))", "{{model}}"),
        stacked=True,
    ),
    timeseries(
        "Texts by model",
        "Whose results were sent to clients.",
        query("sum by (model) (rate(noria_texts_total[1m]))", "{{model}}"),
        stacked=True,
    ),
    timeseries(
        "Tokens",
        "Computed by text encoders: those of texts, and padding to the longest text of a batch.",
        query("sum(rate(noria_tokens_total[1m])) or vector(0)", "tokens"),
        query("sum(rate(noria_padding_tokens_total[1m])) or vector(0)", "padding"),
        stacked=True,
    ),
    timeseries(
        "Time of a batch of texts",
        "Mean, by the number of its texts.",
        mean("noria_text_batch_seconds_total", "noria_text_batches_total", "texts"),
        unit="s",
    ),
    timeseries(
        "Fidelity",
        "How near text encoders are to float32, and quantized image models to those before; 1 is equal.",
        query("max by (model, dtype) (noria_fidelity_ratio)", "{{model}} {{dtype}}"),
    ),
    timeseries(
        "Speed of calls",
        "How many times as fast denoisers are called as uncompiled, where engine.compile_blocks is auto.",
        query("max by (model) (noria_call_speedup_ratio) or vector(1)", "{{model}}"),
    ),
    timeseries(
        "In flight",
        "Requests in progress, including waiting ones; and pages and terminals with a live view.",
        query("sum(noria_requests_in_flight)", "requests"),
        query("sum(noria_live_subscribers)", "live subscribers"),
    ),
    timeseries(
        "Engine time by key",
        "Busy engines' time by API key: who has how much of the devices.",
        query("sum by (key) (rate(noria_key_busy_seconds_total[1m]))", "{{key}}"),
        stacked=True,
    ),
    timeseries(
        "Rejected by reason",
        "`queue_full` and `deadline_unmeetable`: overload. The others: invalid requests, or no engine is ready.",
        query("sum by (reason) (rate(noria_rejected_total[1m]))", "{{reason}}"),
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Deadlines missed",
        "Requests that were accepted with a deadline and not answered in time. Normally 0.",
        query("sum(rate(noria_deadline_missed_total[5m])) or vector(0)", "missed"),
        unit="reqps",
    ),
    timeseries(
        "HTTP by status",
        "All routes. 499: the client disconnected first.",
        query("sum by (status) (rate(noria_http_requests_total[1m]))", "{{status}}"),
        unit="reqps",
        stacked=True,
    ),
)

_RUNNING_BATCH_ROW = row(
    "Running batch",
    timeseries(
        "Slots",
        "Throughput is highest with all slots in use. Images that wait while slots are free would be a bug.",
        query("sum(noria_slots_used)", "used"),
        query("sum(noria_slots)", "available"),
        query("sum(noria_queue_depth)", "waiting"),
    ),
    Panel(
        "Batch size",
        (query("sum by (le) (increase(noria_batch_size_bucket[1m]))", "{{le}}"),),
        "Distribution of the number of images per iteration.",
        kind="heatmap",
    ),
    timeseries(
        "Joins and departures",
        "Images per second that join and leave the batch. Images join at any iteration, so both are smooth. An engine "
        "that ends, or has much more to do than another one, hands over images: they join another one, or begin anew.",
        query("sum(rate(noria_joins_total[1m]))", "joins"),
        query("sum(rate(noria_departures_total[1m]))", "departures"),
        query("sum by (outcome, reason) (rate(noria_images_moved_total[1m]))", "handed over, {{reason}}: {{outcome}}"),
        query("sum by (model) (rate(noria_images_refused_total[1m]))", "refused by a classifier, {{model}}"),
    ),
    timeseries(
        "Evicted images",
        "Images that gave their slot to one that is ahead of them. Their states wait in the host's memory.",
        query("sum(rate(noria_evictions_total[1m]))", "evictions per second"),
        query("sum(noria_evicted)", "evicted"),
    ),
    timeseries(
        "Oldest request in the queue",
        "Age of the oldest request that waits for a slot.",
        query("max(noria_queue_oldest_age_seconds)", "age"),
        unit="s",
    ),
)

_JOBS_ROW = row(
    "Jobs",
    timeseries(
        "Jobs",
        "Jobs accepted, and jobs ended by status.",
        query("sum(rate(noria_jobs_accepted_total[5m]))", "accepted"),
        query("sum by (status) (rate(noria_jobs_total[5m]))", "{{status}}"),
    ),
    timeseries(
        "Webhooks",
        "Delivery attempts by outcome. Failed ones are retried.",
        query("sum by (outcome) (rate(noria_webhook_attempts_total[5m]))", "{{outcome}}"),
    ),
)

_DEPLOYMENTS_ROW = row(
    "Deployments",
    timeseries(
        "Requests by version",
        "To deployed versions. While an endpoint has a canary, it has two.",
        query("sum by (model, version) (rate(noria_deployment_requests_total[1m]))", "{{model}} {{version}}"),
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Failures by version",
        "Share of the requests that failed because of the server.",
        query(
            "(sum by (model, version) (rate(noria_deployment_requests_total{"
            'outcome=~"engine_lost|engine_crashed|generation_failed|internal"}[5m]))'
            " or 0 * sum by (model, version) (rate(noria_deployment_requests_total[5m]))) / "
            "(sum by (model, version) (rate(noria_deployment_requests_total[5m])) > 0)",
            "{{model}} {{version}}",
        ),
        unit="percentunit",
    ),
    timeseries(
        "Time by version",
        "95 % of the successful requests were faster.",
        query(
            "histogram_quantile(0.95, sum by (le, model, version) (rate(noria_deployment_request_seconds_bucket[5m])))",
            "{{model}} {{version}}",
        ),
        unit="s",
    ),
    timeseries(
        "Canary's share",
        "Of the requests to its endpoint.",
        query("max by (model, version) (noria_canary_share_ratio)", "{{model}} {{version}}"),
        unit="percentunit",
    ),
    timeseries(
        "Evidence against the canary",
        "It is rolled back at 20, unless its deployment says otherwise.",
        query("max by (model, version) (noria_canary_evidence)", "{{model}} {{version}}"),
    ),
    timeseries(
        "Copies for the shadow",
        "`dropped`: not computed, because requests were waiting.",
        query("sum by (version, outcome) (rate(noria_shadow_requests_total[1m]))", "{{version}} {{outcome}}"),
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Computing time of copied requests",
        "Mean, by the shadow and by the control.",
        mean("noria_shadow_seconds_sum", "noria_shadow_seconds_count", "version", "arm"),
        unit="s",
    ),
    timeseries(
        "Distance of the shadow",
        "95 % of its outputs were nearer to the control's.",
        query("histogram_quantile(0.95, sum by (le, version) (rate(noria_shadow_distance_bucket[5m])))", "{{version}}"),
    ),
)

_ENDPOINTS_ROW = row(
    "Endpoints with code of your own",
    timeseries(
        "Requests by endpoint",
        "`ok`, or the error code in the response.",
        query("sum by (endpoint, outcome) (rate(noria_endpoint_requests_total[1m]))", "{{endpoint}} {{outcome}}"),
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Time of the code",
        "Mean time of a call, with the calls that it makes.",
        mean("noria_user_code_seconds_sum", "noria_user_code_seconds_count", "endpoint", "method"),
        unit="s",
    ),
    timeseries(
        "Stuck threads",
        "In calls that have exceeded their time limit. When all are, calls are rejected.",
        query("sum(noria_user_code_stuck_threads)", "stuck"),
    ),
)

SERVICE = Dashboard(
    "noria-service",
    "Noria: service",
    "What clients experience, and the state of queue and batch that explains it.",
    (_OVERVIEW_ROW, _LATENCY_ROW, _TRAFFIC_ROW, _RUNNING_BATCH_ROW, _JOBS_ROW, _DEPLOYMENTS_ROW, _ENDPOINTS_ROW),
)
