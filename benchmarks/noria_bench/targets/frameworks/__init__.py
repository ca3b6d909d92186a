"""Other serving frameworks over diffusers' pipeline: LitServe, BentoML, Ray Serve."""
