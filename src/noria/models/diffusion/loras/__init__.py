"""LoRA files and what others of their kind hold, for a loaded model: names, formulas, and their numbers by layer."""
