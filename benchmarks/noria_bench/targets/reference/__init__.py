"""The reference article's server."""
