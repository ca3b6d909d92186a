"""Models: where their folders are, the checks of their files (no torch), their families, and the models themselves."""
