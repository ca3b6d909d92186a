"""Models: their families (`families.py`), checks of model folders (`catalog.py`, no torch), and the models."""
