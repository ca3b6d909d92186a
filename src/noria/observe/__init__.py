"""What operators see of a running server: metrics, logs and traces."""
