"""`noria doctor`: checks a machine, its settings and its model."""
