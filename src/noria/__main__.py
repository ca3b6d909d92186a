"""`python -m noria` is `noria`."""

from noria.cli import main

raise SystemExit(main())
