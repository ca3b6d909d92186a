"""The operators' view of a running server: metrics, logs and traces."""
