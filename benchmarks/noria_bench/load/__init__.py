"""Load generators: closed and open loops."""
