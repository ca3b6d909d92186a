"""Shares of the device: those of clients, in time and in a call, and those of batch keys."""
