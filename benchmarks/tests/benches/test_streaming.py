"""`noria bench streaming`: its server over a real socket, and its arithmetic."""

import json

import pytest

from noria_bench.benches import streaming
from noria_bench.targets.reference.response_modes import RESPONSE_MODES
from noria_bench.targets.reference.streaming_app import random_image_bytes


def test_it_measures_each_mode_with_the_same_body(tmp_path, capsys):
    output = tmp_path / "streaming.json"
    assert streaming.main(output, num_bytes=20_000, round_s=0.01) == 0
    result = json.loads(output.read_text())
    assert set(result["summary"]) == set(RESPONSE_MODES) == set(streaming.MODE_LABELS)
    assert len(result["rounds"]) == streaming.NUM_ROUNDS
    for row in result["summary"].values():
        assert row["replies"] >= 3 * streaming.NUM_ROUNDS
        assert 0 < row["cpu_ms_min"] <= row["cpu_ms"] <= row["cpu_ms_max"]
        assert row["latency_ms"] > 0
    assert {"fastapi", "starlette", "uvicorn", "anyio"} <= set(result["versions"])
    table = capsys.readouterr().out
    assert "| StreamingResponse(BytesIO) | " in table
    assert f"noria {result['noria']} at {result['commit']}" in table


def test_a_stream_by_line_costs_many_times_a_plain_response():
    summary = streaming.measure(num_bytes=200_000, round_s=0.0)["summary"]
    assert summary["bytesio"]["cpu_ms"] > 20 * summary["plain"]["cpu_ms"]  # some 200 times
    assert summary["chunks"]["cpu_ms"] < summary["bytesio"]["cpu_ms"] / 20


def test_a_wrong_body_is_an_error(monkeypatch):
    monkeypatch.setattr(streaming, "random_image_bytes", bytes)
    with pytest.raises(RuntimeError, match="plain sent 1000 bytes that are not the body's 1000"):
        streaming.measure(num_bytes=1000, round_s=0.0)


def make_round(cpu_ms):
    return {mode: {"replies": 4, "latency_ms": 2 * cpu_ms, "cpu_ms": cpu_ms} for mode in RESPONSE_MODES}


def test_pieces_are_lines_or_chunks_and_results_are_medians_of_the_rounds():
    content = b"a\nb\n\nc" + bytes(streaming.CHUNK_BYTES)
    summary = streaming.summarise([make_round(1.0), make_round(9.0), make_round(2.0)], content)
    assert {mode: row["pieces"] for mode, row in summary.items()} == {
        "plain": 1,
        "bytesio": 4,
        "chunks": 2,
        "generator": 1,
    }
    assert summary["plain"] == {
        "pieces": 1,
        "replies": 12,
        "latency_ms": 4.0,
        "cpu_ms": 2.0,
        "cpu_ms_min": 1.0,
        "cpu_ms_max": 9.0,
    }


def test_one_random_byte_in_256_is_a_newline():
    content = random_image_bytes(800_000)
    assert len(content) == 800_000
    assert content == random_image_bytes(800_000)
    assert content.count(b"\n") == pytest.approx(800_000 / 256, rel=0.1)
