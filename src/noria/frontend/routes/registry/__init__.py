"""The routes of the registry: lineage, versions, deployments, statistics."""
