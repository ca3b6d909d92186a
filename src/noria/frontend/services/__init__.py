"""What routes call, by kind of model; what kinds share; the registry. Knows no HTTP."""
