"""Models: what a folder holds (`catalog.py`, no torch), and what is computed with it (the rest)."""
