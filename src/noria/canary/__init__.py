"""Decides about a new version: which requests it gets, whether it is worse, how far its ramp goes. Pure.

`traffic_split` and `ramp` give the canary its share. `distributions` counts what both versions do, `judge` compares
them window by window with the evidence of `e_processes`. `drift` compares a version with its reference distribution.
Nothing here knows a clock, a database or a server: times and counts are arguments, new states are returned.
"""
