"""`noria top`: the wheel in a terminal."""
