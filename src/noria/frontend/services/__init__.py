"""What routes call: admission, generation, jobs. No HTTP."""
