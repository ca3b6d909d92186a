"""Load generators: closed loop, open loop, Locust."""
