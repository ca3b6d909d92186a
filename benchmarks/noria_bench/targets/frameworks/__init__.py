"""LitServe, BentoML, Ray Serve."""
