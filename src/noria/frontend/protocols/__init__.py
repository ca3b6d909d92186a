"""The protocols of clients: each has its bodies, operations and form of errors, and imports no other."""
