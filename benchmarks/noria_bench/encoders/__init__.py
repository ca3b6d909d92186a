"""`noria bench encoders`: Noria's text encoders beside Triton, LitServe, BentoML and FastAPI."""
