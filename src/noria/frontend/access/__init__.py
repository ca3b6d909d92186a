"""Who may do how much: API keys, quotas, concurrency limits, and which proxies to believe. Knows neither routes nor services."""
