"""`python -m noria` runs the command line, like `noria`."""

from noria.cli.main import main

raise SystemExit(main())
