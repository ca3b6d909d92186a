"""Checks of encoders' folders, which say by kind what is in them. No torch."""
