"""The lineage of models: OpenLineage's events, and the walks from a model to its data and back."""
