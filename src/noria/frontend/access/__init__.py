"""Who may do how much: API keys, quotas, concurrency limits, trusted proxies. Knows neither routes nor services."""
