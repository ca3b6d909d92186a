"""PROCESS: starts, watches, restarts and stops the other processes."""
