"""The live view of the running batch: its subscribers and its pictures."""
