"""An engine as others see it: metrics, spans, how long its threads are busy, what was in flight when it ended."""
