"""Readers of the files in model folders: weights, their quantization, GGUF, vocabularies."""
