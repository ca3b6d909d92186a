"""Noria's own protocol for images."""
