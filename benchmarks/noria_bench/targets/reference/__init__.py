"""The server of the reference article."""
