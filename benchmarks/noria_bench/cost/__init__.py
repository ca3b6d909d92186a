"""What metrics, logs and the live view cost."""
