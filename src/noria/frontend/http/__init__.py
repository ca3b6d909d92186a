"""The basis of every route: bodies, responses, errors, event streams, middleware. Knows neither routes nor services."""
