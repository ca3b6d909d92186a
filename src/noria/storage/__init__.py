"""SQL databases: connections, transactions, schema versions and migrations.

Shared by jobs and whatever else keeps tables.
"""
