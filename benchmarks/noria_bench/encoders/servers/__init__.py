"""The servers of `noria bench encoders` that are not Noria, and the loop without a server."""
