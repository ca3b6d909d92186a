"""Text encoders: their folders, their tokenizers, and how they are loaded."""
