"""The servers that Noria is held against, each a process that a bench starts, each drawing as well as it can."""
