"""Requests that nobody waits for: kept in a database, drawn by whichever front end claims them, told of by webhooks.

Knows neither HTTP's server nor the engine: `frontend/routes/jobs.py` brings the requests, and the means to draw them.
"""
