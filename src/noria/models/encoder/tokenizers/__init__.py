"""Texts become tokens, and tokens the rows of a batch. No torch."""
