"""Flow models: their denoiser is a transformer that predicts a velocity."""
