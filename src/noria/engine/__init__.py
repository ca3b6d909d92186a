"""The engine process: one device, one loaded model, one wheel."""
