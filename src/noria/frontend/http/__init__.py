"""What every route needs: bodies, responses, errors, event streams, middleware. Knows neither routes nor services."""
