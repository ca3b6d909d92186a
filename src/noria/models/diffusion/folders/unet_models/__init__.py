"""Folders whose denoiser is a UNet, ControlNets and refiners: FAMILY_folder.py checks and describes one; no torch."""
