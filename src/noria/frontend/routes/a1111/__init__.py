"""AUTOMATIC1111's HTTP interface."""
