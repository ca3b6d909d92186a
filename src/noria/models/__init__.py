"""Models: where their folders are, the checks of what is in them (no torch), their families, and the models themselves."""
