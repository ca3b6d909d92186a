"""The machine's memory and CPU time, of which the engine's models and threads need a part."""
