"""What others see of an engine: metrics, spans, how long its threads are busy, what was in flight when it ended."""
