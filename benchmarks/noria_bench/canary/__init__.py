"""`noria bench canary`: the judge of canaries on simulated traffic, in virtual time."""
