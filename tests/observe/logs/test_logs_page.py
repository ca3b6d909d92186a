"""docs/logs.md lists exactly the fields of a request's log line and the events in the code."""

import pathlib
import re

from noria.observe.logs.request_log import REQUEST_FIELDS
from noria.supervisor.child_process import ChildKind

ROOT = pathlib.Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
SOURCE = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "src" / "noria").rglob("*.py")))


def first_cells(heading: str) -> list[str]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"`([a-z0-9_]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)))


def test_every_field_of_a_request_line_is_documented() -> None:
    assert first_cells("The line of a request") == list(REQUEST_FIELDS)


def test_exactly_the_events_in_the_code_are_documented() -> None:
    own = set(re.findall(r'(?:event="|_log_fields\((?:delivery, )?")([a-z_]+)"', SOURCE))
    of_children = set(re.findall(r'\.log\(logging\.[A-Z]+, "([a-z_]+)"', SOURCE))
    documented = set(first_cells("Events"))
    kinds = ChildKind.__args__
    assert own <= documented
    assert {name.partition("_")[2] for name in documented - own} == of_children
    assert {name.partition("_")[0] for name in documented - own} == set(kinds)
