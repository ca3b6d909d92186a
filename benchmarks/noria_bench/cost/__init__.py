"""`noria bench cost`: the cost of metrics, logs and the live view."""
