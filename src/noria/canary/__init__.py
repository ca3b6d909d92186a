"""Decides about a new version: which requests it gets, whether it is worse, how far its ramp goes. Pure.

`traffic_split` and `ramp` give the canary its share, and `judge` compares what both versions do, window by window, with
the evidence of `e_processes`. Nothing here knows a clock, a database or a server: times and counts are arguments, new
states are returned.
"""
