"""`noria bench sharing`: its report, and one real run."""

import pytest

from noria.config import Config
from noria_bench.encoders.results import Load, Measurement
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.sharing import bench
from noria_bench.sharing.options import SharingOptions
from noria_bench.sharing.report import write_report
from noria_bench.sharing.results import SharingResult, SharingRun

OPEN = Load("fixed", "open", "own", rate=30.0)
CORES = {"image engine": 1.5, "text engine": 0.25, "others": 0.125}


def text_run(value, number, p99_ms, images_per_s=None):
    texts = Measurement(OPEN, 29.0, 100, 1, 5.0, 8.0, p99_ms, num_compared=100, num_wrong=2)
    return SharingRun(value, number, texts, images_per_s, CORES, 10, 1)


def test_the_report_has_texts_alone_and_beside_images_by_division(tmp_path):
    runs = [
        each
        for number in range(2)
        for value, factor in (("shared", 2.0), ("auto", 1.0))
        for each in (
            text_run(value, number, 10.0 + number),
            SharingRun(value, number, None, 4.0, CORES, 10),
            text_run(value, number, 20.0 * factor, 3.0),
        )
    ]
    result = SharingResult(
        collect_provenance(), {"images": "i", "texts": "t"}, {"num_users": 4}, "One | text.", runs, complete=True
    )
    report, plot = write_report(result, tmp_path)
    text = report.read_text(encoding="utf-8")
    assert "| shared, texts alone | 29.0 | 5.0 | 8.0 | 10.5 | – | 2 | 4 of 200 |" in text
    assert "| auto, beside images | 29.0 | 5.0 | 8.0 | 20.0 | 3.00 | 2 | 4 of 200 |" in text
    assert "| auto | 4.00 | 3.00, 0.75 × | 4 |" in text
    assert "| auto, no texts | 1.50 | 0.25 | 0.12 |" in text
    assert "Interrupted" not in text and b"<svg" in plot.read_bytes()


# Starts three servers with two models each: a minute of CPU time.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_images_and_texts_are_served_at_once_with_every_division(tmp_path):
    options = SharingOptions(connections=(2,), rate=5.0, num_users=2, seconds=1.0, num_rounds=1)
    measured = bench.SharingBench(Config(log_level="warning"), options, tmp_path, tmp_path)
    measured.measure()
    assert {run.encoder_cores for run in measured.runs} == {str(value) for value in bench.divisions(Config())}
    for run in measured.runs:
        assert run.texts is None or (run.texts.num_ok and run.texts.num_compared == run.texts.num_ok), run
        assert run.texts is None or not (run.texts.num_failed or run.texts.num_wrong), run
        assert run.images_per_s is None or (run.images_per_s > 0 and run.num_images and not run.num_images_failed), run
        assert run.cores["text engine" if run.texts is not None else "image engine"] > 0
