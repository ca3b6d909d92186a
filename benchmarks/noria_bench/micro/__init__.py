"""Small measurements of single parts."""
