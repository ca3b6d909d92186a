"""The shell of the web pages: the head, the link that skips the navigation, and the navigation."""

from collections.abc import Collection
from html import escape

_NAVIGATION = (
    ("./", "Images", "diffusion"),
    ("text", "Text", "encoder"),
    ("live", "Live", None),
    ("models", "Models", None),
    ("deployments", "Deployments", None),
    ("lineage", "Lineage", None),
    ("drift", "Drift", None),
    ("docs", "API", None),
    ("docs#metrics", "Metrics", None),
)
"""Address, text, and the kind of models whose page it is."""


def page_shell(
    content: str, *, address: str, title: str, styles: Collection[str], script: str, status: str = "connecting"
) -> str:
    """Return the HTML of the page at `address` around `content`, which is from `<main>` on.

    `styles` and `script` are files below `frontend/pages/`; `status` is what the page shows beside the navigation.
    """
    links = "".join(
        f'    <a href="{href}"{_attribute("aria-current", "page" if href == address else None)}'
        f"{_attribute('data-kind', kind)}>{text}</a>\n"
        for href, text, kind in _NAVIGATION
    )
    stylesheets = "".join(
        f'  <link rel="stylesheet" href="pages/{style}">\n' for style in ("shared/style.css", *styles)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <title>Noria: {escape(title)}</title>
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <link rel="icon" href="pages/shared/noria.svg" type="image/svg+xml">
{stylesheets}  <script type="module" src="pages/{script}"></script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header class="site">
  <a class="brand" href="./"><img src="pages/shared/noria.svg" alt="" width="28" height="28">Noria</a>
  <nav aria-label="Pages">
{links}  </nav>
  <span id="page-status" class="chip status">{escape(status)}</span>
</header>
{content}</body>
</html>
"""


def _attribute(name: str, value: str | None) -> str:
    return "" if value is None else f' {name}="{value}"'
