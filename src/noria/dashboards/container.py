"""Dashboard "API container": the server's processes, from Noria's own metrics; cAdvisor is not needed."""

from noria.dashboards.panels import Dashboard, quantiles, query, row, stat, timeseries

CONTAINER = Dashboard(
    "noria-container",
    "Noria: API container",
    "CPU, memory and responsiveness of the server's processes.",
    (
        row(
            "Overview",
            stat(
                "CPU",
                "Share of the cores that the server may use.",
                "sum(rate(noria_process_cpu_seconds_total[1m])) / sum(max by (instance, node) (noria_machine_cores))",
                unit="percentunit",
            ),
            stat(
                "Memory",
                "Share of the memory that the server may use. Memory shared by processes counts once for each.",
                "sum(noria_process_resident_memory_bytes) / sum(max by (instance, node) (noria_machine_memory_bytes))",
                unit="percentunit",
                threshold=0.9,
            ),
            stat("Processes", "Supervisor, front ends and engines.", "count(noria_process_start_time_seconds)"),
            stat(
                "Youngest process",
                "When it started; shows restarts.",
                "1000 * max(noria_process_start_time_seconds)",
                unit="dateTimeFromNow",
            ),
        ),
        row(
            "Processes",
            timeseries(
                "CPU by process",
                "In cores. A front end near 1 is saturated: add one (`frontend.processes`).",
                query("sum by (instance, process) (rate(noria_process_cpu_seconds_total[1m]))", "{{process}}"),
                stacked=True,
            ),
            timeseries(
                "Front ends",
                "Those that accept connections; with bounds in `frontend.processes` their number follows the load.",
                query("sum by (instance) (noria_frontends)", "{{instance}}"),
                query("sum by (instance) (increase(noria_frontend_stops_total[5m]))", "{{instance}} retired in 5 min"),
            ),
            timeseries(
                "Memory by process",
                "Resident memory. It is constant under any load; growth is a bug.",
                query("sum by (instance, process) (noria_process_resident_memory_bytes)", "{{process}}"),
                unit="bytes",
                stacked=True,
            ),
        ),
        row(
            "HTTP",
            timeseries(
                "Event-loop lag",
                "How late the event loops of front ends wake up. Anything that blocks them delays all clients.",
                *quantiles("noria_event_loop_lag_seconds", probabilities=(0.5, 0.99)),
                unit="s",
            ),
            timeseries(
                "Time by route",
                "95 % of a route's requests were faster. Streams last as long as their client is connected.",
                *quantiles("noria_http_request_seconds", by="path", probabilities=(0.95,)),
                unit="s",
            ),
            timeseries(
                "Requests by route",
                "By route template.",
                query("sum by (path) (rate(noria_http_requests_total[1m]))", "{{path}}"),
                unit="reqps",
                stacked=True,
            ),
        ),
    ),
)
