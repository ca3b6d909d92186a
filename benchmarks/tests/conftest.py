"""What the benches' tests share stands beside them, not in a package: put their folder on the path."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
