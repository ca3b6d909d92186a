"""PROCESS: the engine, one per device. It runs one batch, which requests join and leave at every iteration."""
