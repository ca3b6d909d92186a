"""PROCESS: the engine, one for each kind of model on each device."""
