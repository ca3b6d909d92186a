"""Metadata of image files, and the names of schedulers. No torch."""
