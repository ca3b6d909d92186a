"""What runs amount to: figures, tables beside the seed article's own, pictures, a page. Reads runs and nothing else."""
