"""`python -m noria_bench.gpu`: measures the parts."""

import sys

from noria_bench.gpu.command import main

sys.exit(main())
