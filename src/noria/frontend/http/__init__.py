"""What every route needs: bodies, authentication, quotas, errors, server-sent events."""
