"""What every route needs: bodies, authentication, quotas, errors, server-sent events. Knows neither routes nor services."""
