"""Folders whose denoiser is a transformer: FAMILY_folder.py checks and describes one, without torch."""
