"""The services that routes call, by kind of model, and what kinds share. Knows no HTTP."""
