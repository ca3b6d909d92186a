"""Estimates of what fits a machine: the settings that are "auto", and the memory of a model that is not loaded."""
