"""The tables of jobs, and what may happen to their rows."""
