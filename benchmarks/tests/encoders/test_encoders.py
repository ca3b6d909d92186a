"""`noria bench encoders`: its texts, its client, what ab prints, its report, and one real run."""

import json
import math
import statistics
import time

import msgspec
import numpy as np
import psutil
import pytest
import uvloop

from http_servers import HttpServer
from noria.config import Config, EngineConfig
from noria.errors import ConfigError
from noria.models.catalog import open_model_of
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.protocol.text import EncoderModelSpec
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.server import RunningServer
from noria_bench.encoders import bench, client, load_tools, measurements, summary
from noria_bench.encoders.catalog import INTERFACES, Form, make_targets
from noria_bench.encoders.corpus import NUM_TEXTS, mixed_texts
from noria_bench.encoders.options import TARGETS, EncodersOptions
from noria_bench.encoders.random_folder import free_model, write_random_folder
from noria_bench.encoders.report import markdown, write_report
from noria_bench.encoders.results import FILE_NAME, EncodersResult, Load, Measurement, TargetRun, read_result
from noria_bench.encoders.servers.job import Checkpoint, EncoderFiles, EncoderJob, ServerSettings
from noria_bench.encoders.servers.text_encoder import BatchCounters, read_counters
from noria_bench.encoders.servers.triton_server import model_repository
from noria_bench.encoders.target_runner import TargetRunner
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import write_json
from noria_bench.targets import environments

MIXED_16 = Load("mixed", "closed", "own", 16)
MIXED_1 = Load("mixed", "closed", "own", 1)
FIXED_16 = Load("fixed", "closed", "ab", 16)
OPEN = Load("mixed", "open", "own", percent=60, rate=120.0)


def test_mixed_texts_have_the_lengths_of_the_distribution_and_are_reproducible():
    texts = mixed_texts(1)
    assert texts == mixed_texts(1) != mixed_texts(2)
    assert len(set(texts)) > 0.95 * NUM_TEXTS > 1900
    encoded = HuggingFaceTokenizer(open_model_of(EncoderModelSpec, "minilm", EngineConfig())).encode(texts)
    lengths = [each.num_tokens for each in encoded]
    assert min(lengths) == 4 and max(lengths) == 256 and not any(each.num_cut for each in encoded)
    assert 30 <= statistics.median(lengths) <= 34
    # cut to 4–256, it is a little less than the 0.9 that is drawn
    assert 0.8 < statistics.stdev(map(math.log, lengths)) < 0.9


@pytest.fixture
def vector_server():
    """Answers as Noria: the vector [length, 1] of each text; a wrong one for "wrong", an error for "error"."""

    def answer(request):
        text = request.json["input"]
        if text == "gone":
            request.close_connection = True
            return
        vector = [float(len(text)) + (text == "wrong"), 1.0]
        request.send({"data": [{"embedding": vector}]}, 500 if text == "error" else 200)

    with HttpServer(answer) as server:
        yield server


@pytest.mark.parametrize("arrivals", [(), tuple((0.005 * k, k % 4) for k in range(40))], ids=["closed", "open"])
def test_the_client_counts_failures_and_compares_what_it_knows(vector_server, tmp_path, arrivals):
    texts = ("a", "wrong", "error", "unknown")
    np.save(tmp_path / "vectors.npy", np.array([[len(text), 1] for text in texts[:3]], np.float32))
    config = client.ClientConfig(
        vector_server.server_port, "noria", texts, str(tmp_path / "vectors.npy"), arrivals=arrivals,
        **({} if arrivals else {"connections": 4, "seconds": 30.0, "num_requests": 40})
    )  # fmt: skip
    found = uvloop.run(client.run(config))
    assert (len(found.latencies_s), found.num_failed, found.failures) == (30, 10, {"500": 10})
    assert sorted(found.differences) == [0.0] * 10 + [1.0] * 10
    assert min(found.cosines) < 1.0 and found.requests_per_s > 0


@pytest.mark.parametrize("texts", [("error",), ("gone",)], ids=["errors", "broken connections"])
def test_a_closed_loop_ends_early_if_only_errors_come_back(vector_server, tmp_path, texts):
    np.save(tmp_path / "vectors.npy", np.zeros((1, 2), np.float32))
    config = client.ClientConfig(
        vector_server.server_port, "noria", texts, str(tmp_path / "vectors.npy"), seconds=60.0, connections=4
    )
    began_s = time.monotonic()
    found = uvloop.run(client.run(config))
    assert time.monotonic() - began_s < 20.0
    assert not found.latencies_s and 64 <= found.num_failed < 72
    assert found.first_error.startswith('{"data"' if texts == ("error",) else "")


def test_a_target_that_answers_only_errors_ends_with_the_first_of_them(vector_server, tmp_path):
    runner = TargetRunner(Config(), EncodersOptions(), FAKE_ENCODER, Form(threads=1), tmp_path, tmp_path)
    runner.texts["mixed"] = ["error"]
    np.save(tmp_path / "mixed.npy", np.zeros((1, 2), np.float32))
    server = RunningServer(vector_server.server_port, 0.0, psutil.Process())
    with pytest.raises(RuntimeError, match=r"answers only errors: {'500': \d+}, the first one '{\"data"):
        runner.warm_up(make_targets(runner.form)["noria"], server)


AB_OUTPUT = """
Time taken for tests:   4.000 seconds
Complete requests:      100
Failed requests:        1
Non-2xx responses:      9
Requests per second:    25.00 [#/sec] (mean)
"""


def test_ab_s_answers_with_an_error_status_count_as_failed():
    percentiles = "Percentage served,Time in ms\n0,1.0\n50,4.5\n95,9.25\n99,20.125\n"
    found = load_tools.parse_ab(AB_OUTPUT, percentiles, FIXED_16)
    assert (found.num_ok, found.num_failed, found.requests_per_s) == (90, 10, 22.5)
    assert (found.p50_ms, found.p95_ms, found.p99_ms) == (4.5, 9.25, 20.125)
    with pytest.raises(RuntimeError, match="Connection refused"):
        load_tools.parse_ab("apr_socket_connect(): Connection refused (111)", "", FIXED_16)


def test_counters_of_all_encoders_are_summed(tmp_path):
    for _ in range(2):
        counters = BatchCounters(tmp_path)
        counters.add(3, 20, 30)
        counters.add(1, 5, 5)
    assert read_counters(tmp_path) == (4, 8, 50, 70)


def test_a_metric_is_summed_over_its_series_only():
    text = 'a_total{engine="0"} 2\na_total{engine="1"} 3.5\na_total_created 9\n# HELP a_total x\n'
    assert measurements.sum_series(text, "a_total") == 5.5


def test_triton_s_repository_has_the_settings_and_divides_the_threads():
    files = EncoderFiles('/a "quoted"/tokenizer.json', 256, True, "/c", None, "/m.onnx", ("input_ids",), "out")
    plain = model_repository(EncoderJob(files, 1, 2, 384, ServerSettings(max_batch=64)))
    assert "dynamic_batching" not in plain["encoder/config.pbtxt"] and "ragged" not in plain["encoder/config.pbtxt"]
    settings = ServerSettings(max_batch=8, delay_us=2000, instances=2, tokenizers=3, batching=True, ragged=True)
    tuned = model_repository(EncoderJob(files, 1, 2, 384, settings))
    config = tuned["encoder/config.pbtxt"]
    assert "max_queue_delay_microseconds: 2000" in config and config.count("allow_ragged_batch: true") == 2
    assert "count: 2" in config and "count: 3" in tuned["tokenizer/config.pbtxt"]
    (line,) = (line for line in config.splitlines() if line.startswith("parameters"))
    job = json.loads(json.loads(line.partition("string_value: ")[2].removesuffix(" } }")))
    assert (job["tokenizer"], job["session_threads"]) == (files.tokenizer, 1)


def test_triton_by_torch_gets_texts_as_bytes_and_no_mask():
    files = EncoderFiles("/tokenizer.json", 256, True, "/c", Checkpoint(FAKE_ENCODER, "cuda:0", "bfloat16"))
    repository = model_repository(EncoderJob(files, 1, 8, 384, ServerSettings(64, tokenizers=8, ragged=True)))
    assert not any('"attention_mask" ' in file for file in repository.values())
    for name in ("tokenizer", "ensemble"):
        assert 'name: "TEXT" data_type: TYPE_UINT8 dims: [-1]' in repository[f"{name}/config.pbtxt"]
    assert "triton_torch import Encoder as" in repository["encoder/1/model.py"]


@pytest.mark.parametrize("text", ["one", "Größe 東京", "word " * 2000])
def test_a_text_and_its_vector_cross_triton_s_border_in_binary_form(text):
    interface = INTERFACES["triton-torch"]
    body, num_bytes = interface.body(text), len(text.encode())
    length = int(interface.headers["Inference-Header-Content-Length"])
    head = json.loads(body[:length])
    assert body[length:] == text.encode()
    assert head["inputs"][0]["shape"] == [num_bytes]
    vector = np.arange(3, dtype="<f4") / 7
    reply = json.dumps({"outputs": [{"name": "embedding", "datatype": "FP32"}]}).encode() + vector.tobytes()
    np.testing.assert_array_equal(np.array(interface.vector(reply), "f4"), vector)


def measurement(load, rate, p99_ms=100.0, **changes):
    fields = {"num_ok": 100, "num_failed": 0, "p50_ms": 10.0, "p95_ms": 50.0, "p99_ms": p99_ms, "cpu_s": 0.5}
    return Measurement(load, rate, **(fields | changes))


def make_result():
    """Two rounds of Noria, Triton with dynamic batching and the raw loop."""
    runs = []
    for number, (noria, triton) in enumerate(((250.0, 100.0), (270.0, 90.0))):
        runs += [
            TargetRun("raw", number, {}, [measurement(Load("mixed", "closed", "none"), 280.0, None)]),
            TargetRun("noria", number, {}, [
                measurement(FIXED_16, 400.0, cpu_s_by_process={"frontend-0": 0.3, "engine-0": 0.2}),
                measurement(MIXED_1, 80.0, mean_batch=1.0, padding=0.0),
                measurement(MIXED_16, noria, num_compared=50, mean_batch=6.0, padding=0.1),
                measurement(OPEN, 119.0),
            ], check=measurement(MIXED_16, noria, num_compared=256, max_difference=3e-7, min_cosine=1.0)),
            TargetRun("triton-1-batching", number, {"max_batch": 64}, [
                measurement(FIXED_16, 200.0),
                measurement(MIXED_1, 60.0, p50_ms=9.0),
                measurement(MIXED_16, triton, p99_ms=None, num_failed=4),
                measurement(OPEN, 90.0, p99_ms=90.0),
            ]),
        ]  # fmt: skip
    return EncodersResult(
        collect_provenance(), {"name": "minilm", "max_tokens": 256}, {}, {"fixed": "One | text.", "num_texts": 2048},
        threads=2, raw_texts_per_s=280.0, runs=runs, complete=True,
    )  # fmt: skip


def test_ratios_are_paired_by_round_and_goals_say_what_was_missed():
    result = make_result()
    assert summary.paired_ratios(result, "noria", "triton-1-batching", "mixed") == [2.5, 3.0]
    goals = {goal.text.split(";")[0]: goal for goal in summary.goals_of(result)}
    ratio = goals["noria over triton-1-batching, mixed texts, requests per second: at least 2.4"]
    assert ratio.met is True and "2.75" in ratio.text
    assert goals["noria over triton-best, mixed texts, requests per second: at least 1.3"].met is None
    p99 = goals["noria's p99 is lower than each Triton's under every load of mixed texts"]
    assert p99.met is False and "in 1 of 3" in p99.text and "100 ms, triton-1-batching 90 ms" in p99.text
    assert goals["a lone request of mixed texts takes noria no longer than Triton, median"].met is False
    assert "0 of 612 compared are wrong" in goals["no request to noria fails, and no answer is wrong"].text


@pytest.mark.parametrize(
    ("has_openvino", "says"), [(False, "it needs noria-serve[openvino]"), (True, "this CPU has no bfloat16")]
)
def test_targets_in_bfloat16_are_left_out_where_they_cannot_run(tmp_path, monkeypatch, has_openvino, says):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: object() if has_openvino else None)
    monkeypatch.setattr(bench, "has_bfloat16", lambda: False)
    monkeypatch.setattr(bench, "open_model_of", lambda *_: FAKE_ENCODER)
    options = EncodersOptions(targets=("raw", "raw-bfloat16"))
    result = bench.EncodersBench(Config(model="minilm"), options, tmp_path / "out", tmp_path).result()
    assert [each.partition(": ")[0] for each in result.left_out] == ["raw-bfloat16"]
    report = markdown(read_result(write_json(result, tmp_path / FILE_NAME)))
    assert "Left out: raw-bfloat16: " in report and says in report.replace("\\", "")


def test_on_a_gpu_all_targets_compute_by_torch_in_one_precision_with_at_most_eight_threads(monkeypatch):
    monkeypatch.setattr(bench, "find_device", lambda _: "cuda:0")
    monkeypatch.setattr(bench, "num_cores", lambda _: 16)
    form = bench.resolve_form(EngineConfig(), FAKE_ENCODER)
    assert form == Form(8, "cuda:0", by_torch=True, precision="bfloat16")
    assert bench.resolve_form(EngineConfig(threads=4), FAKE_ENCODER).threads == 4
    targets = make_targets(form)
    assert {target.precision for target in targets.values()} == {"bfloat16"}
    assert {targets[name].candidates[0].max_batch for name in ("triton-1-batching", "triton-best", "litserve")} == {64}
    # Without a sweep, Triton has what is best for it: many tokenizers, one encoder, batches of any texts.
    assert targets["triton-best"].candidates[0] == ServerSettings(64, tokenizers=8, batching=True, ragged=True)
    assert {each.instances for name in TARGETS for each in targets[name].candidates[:1]} == {1}
    with pytest.raises(ConfigError, match="'int8', which torch does not compute"):
        bench.resolve_form(EngineConfig(encoder_precision="int8"), FAKE_ENCODER)


@pytest.mark.parametrize(
    ("settings", "target", "reason"),
    [
        ({}, "infinity", "it computes by torch"),
        ({"encoder_backend": "torch"}, "infinity", None),
        ({"encoder_backend": "torch"}, "noria-bfloat16", None),
        ({"encoder_backend": "torch", "encoder_precision": "bfloat16"}, "noria-bfloat16", "all targets"),
    ],
)
def test_targets_that_make_no_sense_are_left_out(settings, target, reason):
    form = bench.resolve_form(EngineConfig(devices=("cpu",), **settings), FAKE_ENCODER)
    found = bench._why_left_out(make_targets(form)[target], form)
    assert found is None if reason is None else reason in found


def test_on_a_gpu_the_goals_are_noria_at_its_best_over_triton_at_its_best():
    result = msgspec.structs.replace(make_result(), device="cuda:0")
    extra = TargetRun("noria-8", 0, {}, [measurement(MIXED_16, 114.0 * 5)])
    goals = [goal.text for goal in summary.goals_of(msgspec.structs.replace(result, runs=[*result.runs, extra]))]
    assert "noria at its best over Triton at its best, one sentence" in goals[0] and "2.00 ×" in goals[0]
    assert "(noria-8 over triton-1-batching)" in goals[1] and "6.00 ×" in goals[1]


def test_a_random_folder_is_a_model_of_embeddings_with_the_lengths_of_minilm(tmp_path):
    write_random_folder(tmp_path / "random", tiny=True)
    spec = open_model_of(EncoderModelSpec, str(tmp_path / "random"), EngineConfig())
    assert (spec.task, spec.pooling, spec.normalize, spec.max_length) == ("embedding", ("mean",), True, 256)
    texts = mixed_texts(1, 64)
    mine, theirs = (
        [each.num_tokens for each in HuggingFaceTokenizer(model).encode(texts)]
        for model in (spec, open_model_of(EncoderModelSpec, "minilm", EngineConfig()))
    )
    assert mine == theirs


def test_the_report_is_made_from_the_json_file(tmp_path):
    file = write_json(make_result(), tmp_path / FILE_NAME)
    report, *plots = write_report(read_result(file), tmp_path)
    text = report.read_text(encoding="utf-8")
    assert "| over triton-1-batching | 2.93 × | 2.00 × | 2.75 × |" in text
    assert "| triton-1-batching | 95.00 | 10.0 | 50.0 | – | not reported | not reported | 4.81 | 8 |" in text
    assert "| noria | 260.00 | 10.0 | 50.0 | 100.0 | 6.0 | 10.0 % | 5.00 | 0 |" in text
    assert "| engine-0 2.00, frontend-0 3.00 |" in text
    assert [plot.name for plot in plots] == ["latency.svg", "throughput.svg"]
    assert all(b"<svg" in plot.read_bytes() for plot in plots)
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a result of noria bench encoders"):
        read_result(file)


def test_the_model_that_costs_nothing_is_written_once(tmp_path):
    folder = free_model(str(tmp_path))
    weights = folder / "model.safetensors"
    written, size = weights.stat().st_mtime_ns, weights.stat().st_size
    assert size < 200_000
    assert free_model(str(tmp_path)) == folder
    assert weights.stat().st_mtime_ns == written


def check_servers(result):
    for run in result.runs[1:]:
        assert run.check.num_compared == 256 and run.check.max_difference < 1e-5
        for each in run.measurements:
            assert each.num_ok and not each.num_failed and not each.num_wrong and each.cpu_s > 0, each
            assert each.mean_batch >= 1.0 and 0.0 <= each.padding < 1.0
            assert run.target != "noria" or {"engine-0", "frontend-0"} <= each.cpu_s_by_process.keys()


# Exports MiniLM, and starts a loop and two servers: half a minute of CPU time.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_noria_and_fastapi_give_right_vectors_under_load(tmp_path):
    options = EncodersOptions(
        targets=("raw", "noria", "fastapi"), connections=(1, 4), seconds=1.0, load_percents=(30,), num_rounds=1
    )
    assert bench.main(Config(model="minilm"), options, tmp_path) == 0
    result = read_result(tmp_path / "encoders.json")
    assert result.complete and [run.target for run in result.runs] == ["raw", "noria", "fastapi"]
    check_servers(result)
    assert "Undecided" in (tmp_path / "report.md").read_text(encoding="utf-8")


# Starts a loop and three servers, of which Triton is installed from the package registry: minutes.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_give_right_vectors_by_torch_on_a_cpu_as_on_a_gpu(tmp_path):
    environments.install("triton", print)
    write_random_folder(tmp_path / "random", tiny=True)
    config = Config(
        model=str(tmp_path / "random"), engine=EngineConfig(devices=("cpu",), threads=1, encoder_backend="torch")
    )
    targets = ("raw", "noria", "noria-8", "fastapi", "triton-best")
    options = EncodersOptions(
        targets=targets, connections=(16,), seconds=1.0, load_percents=(), num_rounds=1, sweeps=False
    )
    assert bench.main(config, options, tmp_path / "out") == 0
    result = read_result(tmp_path / "out" / "encoders.json")
    assert (result.backend, result.precision, result.device) == ("torch", "float32", "cpu")
    assert result.complete and [run.target for run in result.runs] == list(targets)
    check_servers(result)


# Installs the frameworks from the package registry, and starts their servers: minutes.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["triton-1-batching", "litserve", "bentoml"])
def test_a_framework_gives_right_vectors_in_batches(target, tmp_path, monkeypatch):
    environments.install(target.partition("-")[0], print)
    options = EncodersOptions(targets=(target,), connections=(16,), seconds=2.0, load_percents=(), num_rounds=1)
    settings = ServerSettings(max_batch=8, batching=True)
    monkeypatch.setattr(bench.EncodersBench, "_best_settings", lambda self, target: settings)
    assert bench.main(Config(model="minilm"), options, tmp_path) == 0
    (run,) = read_result(tmp_path / "encoders.json").runs
    assert run.settings == msgspec.to_builtins(settings) and run.framework_versions
    assert run.check.num_compared == 256 and run.check.max_difference < 1e-5
    # Equal lengths can share a batch everywhere.
    assert run.measurements[0].mean_batch > 1.5 and not any(each.num_failed for each in run.measurements)
