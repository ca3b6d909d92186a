"""Prompts with a syntax: words with weights, and how their tokens are divided among calls of a text encoder. Pure."""
