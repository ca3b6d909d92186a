"""/openapi.json and /docs, made from the declarations of routes."""
