"""The picture of fair shares shows what the documents say of it."""

import xml.etree.ElementTree as ET

from noria_bench.micro.fair_shares_picture import _PANELS, _SMALL, draw, record


def test_turns_help_the_other_image_and_width_helps_it_more():
    arrival, turns, width = (record(settings) for _, settings in _PANELS)
    assert arrival.ended_s[_SMALL[0]] > 2 * turns.ended_s[_SMALL[0]] > 2 * width.ended_s[_SMALL[0]]
    (num_rows,) = {len(call.clients) for call in turns.calls if _SMALL[0] in call.clients}
    assert (
        num_rows
        == len(arrival.calls[0].clients)
        > max(len(call.clients) for call in width.calls if _SMALL[0] in call.clients)
    )


def test_it_is_an_image_with_each_row_of_each_call():
    cells = sum(len(call.clients) for _, settings in _PANELS for call in record(settings).calls)
    root = ET.fromstring(draw())
    assert len(root.findall(".//{*}g/{*}rect")) == cells == 3 * 84
