"""What every route needs: bodies, responses, errors, server-sent events, middleware. Knows neither routes nor services."""
