"""The HTTP API of text-embeddings-inference."""
