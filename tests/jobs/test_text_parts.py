"""Names of the files of a job's results of texts."""

import pytest

from noria.jobs.text_parts import TextPart


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (TextPart(7, 100, 2000, 3), "part-000007-100-2000-3.f32"),
        (TextPart(1234567, 1, 0, 0, is_ragged=True), "part-1234567-1-0-0.r32"),
    ],
)
def test_the_name_has_all_that_is_known(part, name):
    assert (part.name, TextPart.parse(name)) == (name, part)
