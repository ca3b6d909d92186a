"""How near images with skipped calls are to those of all calls, beside images with as few steps."""
