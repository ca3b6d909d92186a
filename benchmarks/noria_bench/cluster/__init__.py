"""Noria on Ray beside the plain server, with engines whose device sleeps."""
