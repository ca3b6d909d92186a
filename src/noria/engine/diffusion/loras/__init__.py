"""LoRA adapters in the running batch: loaded ones, bounded by bytes, and a different set for each row of a call."""
