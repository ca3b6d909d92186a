"""What routes call: validation, generation, streaming, jobs. Knows no HTTP; `http.quotas` and `http.api_keys` are pure."""
