"""The cost of embeddings and images on one CPU to each other."""
