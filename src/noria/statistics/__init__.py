"""The variables of requests and results that are counted, how, and how far they drift from a reference. Pure.

`variables` says what is counted, `values` computes it, `distributions` counts it, `windows` keeps the counts over time,
and `drift` compares them with a reference. Nothing here knows a clock, a file or a server.
"""
