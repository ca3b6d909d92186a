"""What routes call: validation, generation, streaming, jobs. Knows no HTTP."""
