"""The report of `make gpu`: figures of several folders, goals, and what is missing."""

import pathlib

import msgspec

from noria.engine.encoder.packing_choice import PackingTimes
from noria_bench.encoders.results import FILE_NAME, EncodersResult, Load, Measurement, TargetRun
from noria_bench.gpu import report
from noria_bench.gpu.parts import Models, make_parts
from noria_bench.gpu.session import PartResult, Session
from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import BenchRun, Traffic, write_run
from noria_bench.micro.packed_texts import PackingResult
from noria_bench.running import write_json

PARTS = make_parts(pathlib.Path("out"), Models("a", "b"), small=False)


def write_images(folder, bench, variant, rates, gpu="H100"):
    """Runs of ten seconds with this many answers a second."""
    for target, rate in rates.items():
        records = tuple(
            RequestRecord(k, 0.0, 0.0, 10.0 * k / (10 * rate), 200, None, "", 40.0, 1) for k in range(int(10 * rate))
        )
        traffic = Traffic("closed", 10.0, "uniform", num_users=8)
        provenance = {"machine": {"gpu": gpu}, "date": "2026-12-01"}
        write_run(BenchRun(bench, target, traffic, provenance, {}, {}, records, variant=variant), folder / bench)


def write_texts(folder, part, rates, device="H100"):
    loads = [Load(corpus, "closed", "own", 16) for corpus in ("fixed", "mixed")]
    runs = [TargetRun(name, 0, {}, [Measurement(load, rate, 100, 0) for load in loads]) for name, rate in rates.items()]
    (folder / part).mkdir(parents=True)
    write_json(EncodersResult({}, {}, {}, {}, 8, 0.0, runs=runs, device_name=device), folder / part / FILE_NAME)


def done(folder, *names, content="c0de", gpu="H100"):
    session = Session({}, {})
    for name in names:
        session.record(PartResult(name, "…", content, False, gpu, "2026-12-01", 100.0, 0), folder)


def test_ratios_are_of_the_best_peers_of_all_folders(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    unbatched = {"reference-stream-sync": 1.0, "reference-response-sync": 1.5}
    write_images(first, "scenario2", "", {**unbatched, "reference-batched": 5.0})
    write_images(first, "scenario2", "", {"noria": 6.0, "triton-50ms": 6.5})
    write_images(second, "scenario2", "", {"triton-500ms": 5.5})
    write_images(second, "mixed", "8 users", {"noria": 5.0, "reference-batched": 2.0})
    write_texts(first, "encoders-noria", {"noria": 900.0, "noria-8": 1500.0, "triton-best": 1000.0})
    write_texts(second, "encoders-triton", {"noria": 950.0, "triton-1-batching": 700.0})
    done(first, "scenario2-reference", "scenario2-noria")
    done(second, "mixed", content="older")
    text = report.write_report([first, second], second, PARTS, "c0de", small=False)
    lines = {line.partition(", requests")[0]: line for line in text.splitlines() if line.startswith("- **")}
    assert "6.00 / 1.50 = 4.00 ×" in lines["- **Missed.** scenario 2: noria over the article’s best unbatched endpoint"]
    assert "= 1.20 ×" in lines["- **Met.** scenario 2: noria over the article’s batching"]
    assert "6.00 / 6.50 = 0.92 ×" in lines["- **Missed.** scenario 2: noria over the best measured Triton"]
    assert "5.00 / 2.00 = 2.50 ×" in lines["- **Met.** mixed settings: noria over the article’s batching"]
    assert "- **Undecided.** mixed settings: noria over Triton" in lines
    assert "1500.00 / 1000.00 = 1.50 ×" in lines["- **Met.** one sentence: noria over the best measured Triton"]
    assert "| encoders-noria | missing |" in text
    assert "| mixed | ended with status 0 after 100 s; missing for this code" in text
    assert (second / "report.md").read_text(encoding="utf-8") == text


def test_figures_of_two_devices_and_wrong_answers_decide_nothing(tmp_path):
    write_images(tmp_path, "scenario2", "", {"noria": 6.0})
    write_images(tmp_path, "scenario2", "", {"reference-batched": 5.0}, gpu="H200")
    write_texts(tmp_path, "encoders-noria", {"noria": 1500.0, "triton-best": 1000.0})
    (failed,) = report.read_results([tmp_path]).encoders.values()
    failed.runs[0].measurements[0] = msgspec.structs.replace(failed.runs[0].measurements[0], num_failed=3)
    write_json(failed, tmp_path / "encoders-noria" / FILE_NAME)
    text = report.write_report([tmp_path], tmp_path, PARTS, "c0de", small=False)
    assert "6.00 / 5.00 = 1.20 ×, on an H100 and an H200: no comparison." in text
    assert "1500.00 / 1000.00 = 1.50 ×; 3 and 0 answers failed or were wrong." in text
    assert "**Met.**" not in text and "**Missed.**" not in text


def test_without_results_everything_is_missing(tmp_path):
    text = report.write_report([tmp_path], tmp_path, PARTS, "c0de", small=True)
    assert text.count("not measured") == 8 and text.count("| missing |") == len(PARTS)
    assert "is no result" in text


def test_packed_texts_are_beside_padded_ones(tmp_path):
    times = {32: PackingTimes(128, 9000, 0.2, 0.1, 0.001, 0.002, 0.99999)}
    (tmp_path / "encoders-packed.json").write_bytes(msgspec.json.encode(PackingResult({}, "H100", "bfloat16", times)))
    text = report.write_report([tmp_path], tmp_path, PARTS, "c0de", small=False)
    assert "| 32 | 45000.00 | 90000.00 | 2.00 × | 0.50 × | 0.99999 | H100 |" in text
