"""The benches, a module each, and their options."""
