"""The registry over HTTP: versions, deployments, lineage and statistics."""
