"""Faults in parsed YAML, which checks must find."""

import copy


def plant(document, path, value):
    """Return a copy of `document` with `value` at `path`."""
    planted = copy.deepcopy(document)
    *parents, last = path
    node = planted
    for parent in parents:
        node = node[parent]
    node[last] = value
    return planted
