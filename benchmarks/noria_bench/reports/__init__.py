"""Tables, plots and pages of runs."""
