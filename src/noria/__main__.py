"""`python -m noria` is `noria`."""

from noria.cli.main import main

raise SystemExit(main())
