"""The runtime of text encoders."""
