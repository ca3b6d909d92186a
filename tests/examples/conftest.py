"""The example's modules are scripts beside one another, not a package: put their folder on the path."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "demo_model"))
