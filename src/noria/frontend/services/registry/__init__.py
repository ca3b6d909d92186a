"""What the routes of the registry call: versions, lineage, statistics, in threads."""
