"""Decides what the device does next. Pure: no clock, no I/O, no arrays, no logging; time is an argument."""
