"""The registry: models and their versions, the runs and data that made them, and what is deployed.

It knows no server and no engine. `schema.py` has its tables.
"""
