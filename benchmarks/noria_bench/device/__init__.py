"""The device bench: UNets at their published sizes."""
