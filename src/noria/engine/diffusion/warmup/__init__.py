"""The preparation of a loaded model before it serves: its blocks are compiled, its costs measured."""
