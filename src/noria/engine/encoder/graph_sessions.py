"""Text encoders on a CPU, as an ONNX graph: by ONNX Runtime in float32 and int8, by OpenVINO in bfloat16."""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from noria.errors import ConfigError, ModelError
from noria.extras import require
from noria.models.encoder.onnx_export import OnnxFile
from noria.models.encoder.tokenizers.token_rows import FloatArray, Row, stack, unpad

_PROVIDER = ("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
GraphRun = Callable[[dict[str, NDArray[Any]]], FloatArray]
"""Returns a graph's result of its inputs by name."""


class GraphSession:
    """A `Session` that computes a graph."""

    def __init__(self, graph: OnnxFile, run: GraphRun, run_alone: GraphRun | None = None) -> None:
        """`run_alone` uses the threads of all sessions; None: there is no such one."""
        self._inputs, self._run, self._run_alone = graph.record.inputs, run, run_alone or run
        self.is_faster_alone, self.is_packed = run_alone is not None, False

    def run(self, rows: Sequence[Row], is_alone: bool = False) -> list[FloatArray]:
        """Compute rows of one kind; see `Session.run`."""
        run = self._run_alone if is_alone else self._run
        return unpad(run(stack(rows, self._inputs)), rows)


def load_onnx(graph: OnnxFile, num_sessions: int, threads: int, file: pathlib.Path | None = None) -> list[GraphSession]:
    """Open `file`, or the graph's own, with ONNX Runtime.

    Sessions of one thread compute in the thread that calls them; they share one copy of the weights. For a batch that
    runs alone they have another, with a thread for each of them. Memory is kept for the next batch, in pieces of the
    size that was needed: in pieces of doubled size, or planned for each shape, it grows with each new shape
    (onnxruntime#11627). Threads sleep between batches: spinning, they took half as much CPU time again.
    """
    file = file or graph.file
    if threads > 1:
        return [GraphSession(graph, _open(graph, file, threads)) for _ in range(num_sessions)]
    run_alone = _open(graph, file, num_sessions, spins=True) if num_sessions > 1 else None
    return [GraphSession(graph, _open(graph, file, 1), run_alone)] * num_sessions


def _open(graph: OnnxFile, file: pathlib.Path, threads: int, spins: bool = False) -> GraphRun:
    """Load a file; with `spins`, threads wait for each other by spinning within a batch."""
    onnxruntime = require("onnxruntime", "encoders", "a text encoder on a CPU")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_mem_pattern = False
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=[_PROVIDER])
    except Exception as error:  # the library's classes have no other common base
        raise ModelError(f"{file}: ONNX Runtime cannot load it: {error}.") from error

    def run(inputs: dict[str, NDArray[Any]]) -> FloatArray:
        result: FloatArray = session.run([graph.record.output], inputs)[0]
        return result

    return run


def load_int8(graph: OnnxFile, num_sessions: int, threads: int) -> list[GraphSession]:
    """Quantize the weights to int8, each channel by itself, once; open that with ONNX Runtime."""
    file = graph.file.with_name("model-int8.onnx")
    if not file.exists():
        require("onnx", "encoders-export", "quantizing a model to int8")
        from onnxruntime.quantization import QuantType, quantize_dynamic

        temporary = file.with_suffix(f".{os.getpid()}")
        quantize_dynamic(graph.file, temporary, per_channel=True, weight_type=QuantType.QInt8)
        temporary.replace(file)  # atomic, because another engine may read the file now
    return load_onnx(graph, num_sessions, threads, file)


def load_openvino(graph: OnnxFile, num_sessions: int, threads: int) -> list[GraphSession]:
    """Compile the graph with OpenVINO for bfloat16. Raises ConfigError: this CPU has no bfloat16."""
    if not has_bfloat16():
        raise ConfigError(
            "engine.encoder_precision is 'bfloat16', which this CPU lacks (neither AVX512-BF16 nor AMX). Use float32."
        )
    compiled = (
        import_openvino()
        .Core()
        .compile_model(
            str(graph.file),
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "bf16",
                "NUM_STREAMS": num_sessions,
                "INFERENCE_NUM_THREADS": num_sessions * threads,
                "ENABLE_CPU_PINNING": False,
            },
        )
    )

    def open_session() -> GraphSession:
        request = compiled.create_infer_request()

        def run(inputs: dict[str, NDArray[Any]]) -> FloatArray:
            result: FloatArray = request.infer(inputs)[graph.record.output].copy()  # the next call uses its memory
            return result

        return GraphSession(graph, run)

    return [open_session() for _ in range(num_sessions)]


def has_bfloat16() -> bool:
    """Whether OpenVINO computes in bfloat16 on this CPU. Raises MissingExtra without OpenVINO."""
    return "BF16" in import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which would start a thread that reports to its makers."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return require("openvino", "openvino", "engine.encoder_precision 'bfloat16' on a CPU")
