"""The rerankers' API that Jina, Cohere and vLLM share."""
