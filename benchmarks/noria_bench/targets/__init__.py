"""The servers that are compared, and how they are started."""
