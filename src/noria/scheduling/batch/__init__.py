"""Scheduling of texts for encoders: each text takes one model call, shared with texts of similar length."""
