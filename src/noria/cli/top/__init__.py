"""`noria top`: the live view of a server in a terminal."""
