"""Traces: what is read, and what is said of bad lines."""

import pytest

from noria_bench.simulator.trace import convert_burstgpt, convert_gentd26, read_trace, write_trace
from noria_bench.simulator.workload import Arrival, Shape, SimulateError, make_arrivals


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.csv"


def test_a_written_trace_is_read_again(file):
    arrivals = list(make_arrivals("poisson", 5.0, [Shape(images=2, priority="high", deadline_s=4.0)], 20.0, 1))
    assert write_trace(file, iter(arrivals)) == len(arrivals)
    again = list(read_trace(file))
    assert [each.at_s for each in again] == pytest.approx([each.at_s for each in arrivals], abs=1e-3)
    assert {each[1:] for each in again} == {each[1:] for each in arrivals}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,size\n0,1\n", "no column steps; its columns are arrival_s, size"),
        ("", "no column arrival_s; its columns are none"),
        ("arrival_s,steps\n0,20\n1,x\n", "line 3: steps is 'x'; it must be a number from 1 to 1000"),
        ("arrival_s,steps\n0,2.5\n", "line 2: steps is '2.5'; it must be a whole number"),
        ("arrival_s,steps\n5,20\n4,20\n", "line 3: arrival_s is '4'; it must be a time that is not before"),
        ("arrival_s,steps\n0,20,7\n", "line 2: expected 2 values"),
        ("arrival_s,steps\n0\n", "line 2: expected 2 values"),
        ("arrival_s,steps,priority\n0,20,vip\n", "priority is 'vip'; it must be one of low, normal, high"),
        ("arrival_s,steps\nnan,20\n", "arrival_s is 'nan'"),
        ("arrival_s,steps,wdith\n0,20,1024\n", "has a column 'wdith'. Did you mean 'width'?"),
        ("arrival_s,steps,steps\n0,20,30\n", "has a column twice"),
    ],
)
def test_a_bad_line_is_named_with_what_is_allowed(file, text, message):
    file.write_text(text)
    with pytest.raises(SimulateError, match=message):
        list(read_trace(file))


def test_a_file_that_is_missing_or_no_text_is_said(file):
    with pytest.raises(SimulateError, match="No such file"):
        list(read_trace(file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SimulateError, match="no CSV in UTF-8"):
        list(read_trace(file))


def test_public_traces_are_converted_from_their_first_request_on(file):
    file.write_text(
        "gmt_create,num_inference_steps,num_images_per_prompt,checkpoint_model_version_id\n"
        "2024-05-01 00:00:10,30,2,m1\n2024-05-01 00:00:04,20,,m2\n"
    )
    assert list(convert_gentd26(file)) == [Arrival(0.0, "m2", 512, 512, 20, 1), Arrival(6.0, "m1", 512, 512, 30, 2)]
    file.write_text("Timestamp,Model\n5,ChatGPT\n45,GPT-4\n")
    assert [each.at_s for each in convert_burstgpt(file)] == [0.0, 40.0]
