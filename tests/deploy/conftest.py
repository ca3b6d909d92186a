"""Puts this folder on the path: the tests share the module `container`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
