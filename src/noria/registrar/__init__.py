"""Carries out deployments in a running server: loads versions, moves traffic, judges canaries, releases versions."""
