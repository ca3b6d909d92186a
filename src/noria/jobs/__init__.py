"""Asynchronous requests: stored in a database, executed by the front end that claims them, reported by webhooks.

Knows neither the HTTP server nor the engine: `frontend/jobs/routes.py` brings the requests,
`frontend/jobs/image_executor.py` executes them.
"""
