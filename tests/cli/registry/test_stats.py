"""`noria stats`: what a server has counted, and references from it and from files."""

import json
import time

import pytest

from noria.registry.statistics.file import encode_statistics
from noria.statistics.distributions import CategoryCounts, Histogram
from noria.statistics.variables import BUILT_IN_VARIABLES
from noria.statistics.windows import CountsReport, SeriesKey, StatisticsHistory
from noria.storage.private_files import replace_private_file

WINDOW_S = 3600.0
STEPS = BUILT_IN_VARIABLES["inference_steps"]


@pytest.fixture
def counted(tmp_path, noria):
    """A server that has counted steps and schedulers of the bundled model, 150 values in each of two windows."""
    fingerprint = json.loads(noria("models", "add", "shapes", "bundled", "--json"))["fingerprint"]
    now, history = int(time.time() / WINDOW_S), StatisticsHistory(WINDOW_S)
    for window, steps in ((now - 3, 12.0), (now, 30.0)):
        histogram, schedulers = Histogram(STEPS.edges), CategoryCounts(counts={"ddim": 100, "pndm": 50})
        for _ in range(150):
            histogram.record(steps)
        for variable, kind, counts in (("inference_steps", "scalar", histogram), ("scheduler", "category", schedulers)):
            history.add([CountsReport(SeriesKey("t2i", fingerprint, variable), kind, window, counts)])
    few = Histogram((0.0,), [0, 9], 18.0)
    history.add([CountsReport(SeriesKey("t2i", fingerprint, "price"), "value", now, few)])
    replace_private_file(tmp_path / "data" / "statistics.json", encode_statistics(history.snapshot(now, [])))
    return fingerprint


def test_nothing_is_counted_at_first(noria):
    assert noria("stats", "show").startswith("nothing was counted; let a server count: --statistics-builtin")
    assert "nothing was counted yet" in noria("stats", "baseline", "t2i", status=2)


def test_what_is_counted_is_a_table(noria, counted):
    header, *rows = noria("stats", "show", "t2i").splitlines()
    assert header.split() == ["endpoint", "version", "variable", "kind", "values", "PSI", "reference", "of"]
    assert [row.split() for row in rows] == [
        ["t2i", counted, "inference_steps", "scalar", "300", "mean", "21"],
        ["t2i", counted, "price", "value", "9", "mean", "2"],
        ["t2i", counted, "scheduler", "category", "300", "ddim", "67", "%,", "pndm", "33", "%"],
    ]
    assert json.loads(noria("stats", "show", "--json").splitlines()[0])["current"]["counts"][4] == 150
    assert "nothing was counted at 't2'. Did you mean 't2i'? Counted was t2i." in noria("stats", "show", "t2", status=2)


def test_a_reference_is_what_was_counted(noria, counted):
    printed = noria("stats", "baseline", "t2i", "--why", "a good day")
    assert printed == "shapes@1 at t2i has a reference of inference_steps (300 values), scheduler (300 values)\n"
    printed = noria("stats", "baseline", "t2i", "--version", "shapes@1", "--variable", "scheduler", "--json")
    assert list(json.loads(printed)["counts"]) == ["scheduler"]
    printed = noria("stats", "baseline", "t2i", "--last", "1h", status=2)
    assert "a reference needs 200 values or more; inference_steps has 150, scheduler has 150" in printed
    assert "no values of 'schedule'. Did you mean 'scheduler'" in noria(
        "stats", "baseline", "t2i", "--variable", "schedule", status=2
    )
    printed = noria("stats", "baseline", "t2i", "--delete")
    assert printed == "shapes@1 at t2i is compared with nothing in inference_steps, scheduler\n"
    assert "has no reference at 't2i'" in noria("stats", "baseline", "t2i", "--delete", status=2)


def test_a_reference_may_be_training_data(noria, tmp_path):
    noria("models", "add", "shapes", "bundled")
    (tmp_path / "data.csv").write_text("prompt,other\n" + "a red circle,1\n" * 250)
    printed = noria("stats", "baseline", "t2i", "--version", "shapes@1", "--from", str(tmp_path / "data.csv"))
    assert "prompt_chars (250 values), prompt_words (250 values)" in printed
    assert printed.endswith("; columns that are no variables, or have fewer than 200 values: other\n")
    chosen = ("--version", "shapes@1", "--from", str(tmp_path / "data.csv"), "--variable", "scheduler")
    assert "has no column 'scheduler'. It has the columns prompt, other." in noria(
        "stats", "baseline", "t2i", *chosen, status=2
    )
    (tmp_path / "data.csv").write_text("other\n1\n")
    printed = noria("stats", "baseline", "t2i", "--version", "shapes", "--from", str(tmp_path / "data.csv"), status=2)
    assert "has the columns other, none of which is a variable" in printed


def test_what_code_counts_without_a_model_has_no_reference(noria, tmp_path):
    history = StatisticsHistory(WINDOW_S)
    counts = CategoryCounts(counts={"ddim": 300})
    history.add([CountsReport(SeriesKey("topics", "none", "scheduler"), "category", 1, counts)])
    replace_private_file(tmp_path / "data" / "statistics.json", encode_statistics(history.snapshot(1, [])))
    printed = noria("stats", "baseline", "topics", status=2)
    assert "what 'topics' has counted belongs to no version" in printed and "preprocess" in printed


def test_what_is_wrong_is_one_line(noria, counted, capsys):
    with pytest.raises(SystemExit):
        noria("stats", "baseline", "t2i", "--last", "soon")
    assert "'soon'; a time is a number and s, m, h or d, such as 6h" in capsys.readouterr().err
    assert "no version with the fingerprint" in noria("stats", "baseline", "t2i", "--version", "0" * 12, status=2)
    assert "there is no model 'x'" in noria("stats", "baseline", "t2i", "--version", "x", status=2)
