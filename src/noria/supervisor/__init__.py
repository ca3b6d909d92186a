"""PROCESS: starts, monitors, restarts and stops the other processes, and writes the log of all of them."""
