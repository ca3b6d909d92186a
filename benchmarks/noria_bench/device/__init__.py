"""The device bench: UNets of true size."""
