"""The command line: one module for each command, `main.py` to dispatch."""
