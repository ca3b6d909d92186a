"""What is measured during a run."""
