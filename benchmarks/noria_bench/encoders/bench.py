"""`noria bench encoders`: runs the targets in turn, in rounds, each time as a fresh server.

The raw loop is measured first. Then the settings of the targets that have several candidates are swept. Odd rounds go
through the targets backwards, so that a drift of the machine's speed affects all alike. A target that fails is
reported, and the next one starts; Ctrl-C and SIGTERM keep what was measured.
"""

import importlib.util
import pathlib
import tempfile
from dataclasses import asdict, dataclass, field

import msgspec

from noria.config import Config, EngineConfig
from noria.engine.encoder.graph_sessions import has_bfloat16
from noria.engine.encoder.sessions import find_device, num_cores, resolve_precision, resolve_sessions, uses_torch
from noria.errors import ConfigError, NoriaError
from noria.models.catalog import open_model_of
from noria.observe.cpuinfo import cpu_model
from noria.protocol.text import EncoderModelSpec
from noria_bench.encoders.catalog import INTERFACES, EncoderTarget, Form, make_targets
from noria_bench.encoders.corpus import FIXED_TEXT
from noria_bench.encoders.options import EncodersOptions
from noria_bench.encoders.report import write_report
from noria_bench.encoders.results import FILE_NAME, EncodersResult, SweepRow, TargetRun
from noria_bench.encoders.servers.job import ServerSettings
from noria_bench.encoders.target_runner import TargetRunner
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import make_results_folder, run_to_end, status_log, write_json
from noria_bench.targets.server import interpreter_of, quiet_config

_log_status = status_log("encoders")
_SWEEP_CONNECTIONS = 32
_SWEEP_S = 3.0
_SWEEP_WARM_UP = 64  # requests
# On a GPU more threads only wait for each other, and Triton's tokenizers take memory each.
_MAX_GPU_THREADS = 8


def main(config: Config, options: EncodersOptions, folder: pathlib.Path) -> int:
    """Measure, write JSON, the report and the plots into `folder`, print the report; returns the exit status.

    Raises:
        NoriaError: the model is no encoder of embeddings, a target is not installed, or the folder cannot be created.

    """
    if config.model == "free":
        from noria_bench.encoders.random_folder import free_model

        config = msgspec.structs.replace(config, model=str(free_model(config.engine.cache_dir)))
    with tempfile.TemporaryDirectory(prefix="noria-encoders-") as name:
        bench = EncodersBench(quiet_config(config), options, folder, pathlib.Path(name))
        status = run_to_end(bench.measure, _log_status, bench.failures)
    if bench.runs:
        print(write_report(bench.result(), folder)[0].read_text(encoding="utf-8"))
    for text in (*(f"left out: {each}" for each in bench.left_out), *bench.failures):
        _log_status(text)
    return status


@dataclass
class EncodersBench:
    """The state of the bench: what has been measured so far."""

    config: Config
    options: EncodersOptions
    folder: pathlib.Path
    work: pathlib.Path  # temporary
    sweep: list[SweepRow] = field(default_factory=list)
    runs: list[TargetRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    targets: list[EncoderTarget] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self.spec = open_model_of(EncoderModelSpec, self.config.model, self.config.engine)
        if self.spec.task != "embedding":
            raise ConfigError(
                f"{self.spec.name} is for {self.spec.task}; this bench needs a model of embeddings, such as minilm."
            )
        self.form = resolve_form(self.config.engine, self.spec)
        targets = make_targets(self.form)
        for target in (targets[name] for name in self.options.targets):
            if reason := _why_left_out(target, self.form):
                self.left_out.append(f"{target.name}: {reason}")
            else:
                self.targets.append(target)
        for target in self.targets:
            if target.kind != "raw":
                interpreter_of(INTERFACES[target.kind].framework)
        make_results_folder(self.folder)
        self._provenance = collect_provenance()
        self._runner = TargetRunner(self.config, self.options, self.spec, self.form, self.folder, self.work)

    def measure(self) -> None:
        """Measure everything; saves after each server."""
        export = "" if self.form.by_torch else "exporting the model, if that was not done, and "
        _log_status(f"{export}computing what is right")
        self._runner.prepare()
        settings = {target.name: self._best_settings(target) for target in self.targets if target.kind != "raw"}
        for number in range(self.options.num_rounds):
            for target in self.targets if number % 2 == 0 else reversed(self.targets):
                try:
                    self.runs.append(
                        self._runner.raw_run(target, number)
                        if target.kind == "raw"
                        else self._runner.server_run(target, settings[target.name], number)
                    )
                except (RuntimeError, OSError, NoriaError) as error:
                    self.failures.append(f"round {number + 1}: {target.name} failed: {error}")
                    _log_status(self.failures[-1])
                write_json(self.result(), self.folder / FILE_NAME)
        self.complete = True
        write_json(self.result(), self.folder / FILE_NAME)

    def result(self) -> EncodersResult:
        """The document so far."""
        spec = self.spec
        return EncodersResult(
            provenance=self._provenance,
            model={
                "name": spec.name,
                "fingerprint": spec.fingerprint,
                "parameters": spec.num_parameters,
                "max_tokens": spec.max_length,
            },
            options=asdict(self.options),
            corpus={"num_texts": len(self._runner.texts["mixed"]), "fixed": FIXED_TEXT},
            threads=self.form.threads,
            device=self.form.device,
            device_name=_name_of(self.form.device),
            backend="torch" if self.form.by_torch else "onnxruntime",
            precision=self.form.precision,
            raw_texts_per_s=self._runner.raw_texts_per_s,
            sweep=self.sweep,
            runs=self.runs,
            left_out=self.left_out,
            failures=self.failures,
            complete=self.complete,
        )

    def _best_settings(self, target: EncoderTarget) -> ServerSettings:
        """The candidate with the most requests per second on mixed texts; the first one without a sweep."""
        if len(target.candidates) == 1 or not self.options.sweeps:
            return target.candidates[0]
        runner, rates = self._runner, list[float]()
        for settings in target.candidates:
            try:
                with runner.server(target, settings) as server:
                    runner.warm_up(target, server, _SWEEP_WARM_UP)
                    rates.append(
                        runner.client(
                            target, server, "mixed", connections=_SWEEP_CONNECTIONS, seconds=_SWEEP_S
                        ).requests_per_s
                    )
            except (RuntimeError, OSError) as error:
                self.failures.append(f"sweep: {target.name} with {settings} failed: {error}")
                rates.append(0.0)
            _log_status(f"sweep: {target.name} {_plain(settings)}: {rates[-1]:.1f} requests/s")
        best = rates.index(max(rates))
        self.sweep += [
            SweepRow(target.name, msgspec.to_builtins(settings), rate, chosen=index == best)
            for index, (settings, rate) in enumerate(zip(target.candidates, rates, strict=True))
        ]
        return target.candidates[best]


def resolve_form(engine: EngineConfig, spec: EncoderModelSpec) -> Form:
    """Return how all targets compute: on a GPU by torch, on a CPU by ONNX Runtime, unless `engine` says torch.

    Raises:
        ConfigError: the device does not exist, or torch does not compute in the precision.

    """
    device, cores = find_device(engine.devices[0]), num_cores(engine)
    sessions, session_threads = resolve_sessions(engine, spec.num_parameters, cores)
    threads = sessions * session_threads
    if device != "cpu":
        threads = min(cores, _MAX_GPU_THREADS) if engine.threads == "auto" else engine.threads
    if not uses_torch(engine, device):
        return Form(threads)
    match resolve_precision(engine, device):
        case "float32" | "bfloat16" as precision:
            return Form(threads, device, by_torch=True, precision=precision)
        case other:
            raise ConfigError(f"engine.encoder_precision is {other!r}, which torch does not compute. Use bfloat16.")


def _why_left_out(target: EncoderTarget, form: Form) -> str | None:
    """Why a target cannot run here; None if it can."""
    if target.kind == "infinity" and not form.by_torch:
        return "it computes by torch: use --encoder-backend torch, or a GPU"
    if not target.name.endswith("-bfloat16"):
        return None
    if form.precision == "bfloat16":
        return "all targets compute in bfloat16"
    return None if form.by_torch else _without_bfloat16()


def _name_of(device: str) -> str:
    if device == "cpu":
        return cpu_model()
    import torch

    return torch.cuda.get_device_name(device)


def _without_bfloat16() -> str | None:
    """Why OpenVINO computes nothing in bfloat16 here; None if it does."""
    if importlib.util.find_spec("openvino") is None:
        return "it needs noria-serve[openvino]"
    return None if has_bfloat16() else "this CPU has no bfloat16 (neither AVX512-BF16 nor AMX)"


def _plain(settings: ServerSettings) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(settings).items())
