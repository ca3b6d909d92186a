"""Deciding what the device does next. Pure: no clock, no I/O, no arrays, no logging; time comes in as an argument."""
