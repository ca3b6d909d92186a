"""What embeddings and images on one CPU cost each other."""
