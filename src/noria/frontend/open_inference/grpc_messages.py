"""The messages of the protocol over gRPC, with the field numbers of the open specification and of Triton's extensions.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto

The descriptors are in a pool of their own: a second file of the same names in protobuf's default pool, as a client in
the same process brings it, would be an error. Fields of Triton's that this server never sets are left out.
"""

import functools
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

_Fields = Mapping[str, tuple[int, str]]

# By message: fields by name, with number and type; `*` is repeated, `map` is map<string, …>, `oneof` is one of several.
_MESSAGES: Mapping[str, _Fields] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "*string")},
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "*string"),
        "platform": (3, "string"),
        "inputs": (4, "*ModelMetadataResponse.TensorMetadata"),
        "outputs": (5, "*ModelMetadataResponse.TensorMetadata"),
    },
    "ModelMetadataResponse.TensorMetadata": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "*int64")},
    "InferParameter": {
        "bool_param": (1, "oneof bool"),
        "int64_param": (2, "oneof int64"),
        "string_param": (3, "oneof string"),
        "double_param": (4, "oneof double"),
        "uint64_param": (5, "oneof uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "*bool"),
        "int_contents": (2, "*int32"),
        "int64_contents": (3, "*int64"),
        "uint_contents": (4, "*uint32"),
        "uint64_contents": (5, "*uint64"),
        "fp32_contents": (6, "*float"),
        "fp64_contents": (7, "*double"),
        "bytes_contents": (8, "*bytes"),
    },
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "inputs": (5, "*ModelInferRequest.InferInputTensor"),
        "outputs": (6, "*ModelInferRequest.InferRequestedOutputTensor"),
        "raw_input_contents": (7, "*bytes"),
    },
    "ModelInferRequest.InferInputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "*int64"),
        "parameters": (4, "map InferParameter"),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferRequest.InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, "map InferParameter")},
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "outputs": (5, "*ModelInferResponse.InferOutputTensor"),
        "raw_output_contents": (6, "*bytes"),
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "*int64"),
        "parameters": (4, "map InferParameter"),
        "contents": (5, "InferTensorContents"),
    },
    # Triton's extensions
    "ModelConfigRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "*ModelInput"),
        "output": (6, "*ModelOutput"),
        "parameters": (14, "map ModelParameter"),
        "backend": (17, "string"),
    },
    "ModelInput": {"name": (1, "string"), "data_type": (2, "DataType"), "dims": (4, "*int64"), "optional": (8, "bool")},
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "DataType"), "dims": (3, "*int64")},
    "ModelParameter": {"string_value": (1, "string")},
    "ModelStatisticsRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelStatisticsResponse": {"model_stats": (1, "*ModelStatistics")},
    "ModelStatistics": {
        "name": (1, "string"),
        "version": (2, "string"),
        "last_inference": (3, "uint64"),
        "inference_count": (4, "uint64"),
        "execution_count": (5, "uint64"),
        "inference_stats": (6, "InferStatistics"),
        "batch_stats": (7, "*InferBatchStatistics"),
    },
    "InferStatistics": {
        name: (number, "StatisticDuration")
        for number, name in enumerate(
            (
                "success",
                "fail",
                "queue",
                "compute_input",
                "compute_infer",
                "compute_output",
                "cache_hit",
                "cache_miss",
            ),
            1,
        )
    },
    "StatisticDuration": {"count": (1, "uint64"), "ns": (2, "uint64")},
    "InferBatchStatistics": {
        "batch_size": (1, "uint64"),
        "compute_input": (2, "StatisticDuration"),
        "compute_infer": (3, "StatisticDuration"),
        "compute_output": (4, "StatisticDuration"),
    },
    "RepositoryModelLoadRequest": {},
    "RepositoryModelLoadResponse": {},
    "RepositoryModelUnloadRequest": {},
    "RepositoryModelUnloadResponse": {},
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "RepositoryIndexResponse": {"models": (1, "*RepositoryIndexResponse.ModelIndex")},
    "RepositoryIndexResponse.ModelIndex": {
        "name": (1, "string"),
        "version": (2, "string"),
        "state": (3, "string"),
        "reason": (4, "string"),
    },
}

_DATA_TYPES = {"TYPE_INVALID": 0, "TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_STRING": 13}


def message(name: str) -> Any:
    """Return the class of a message, such as "ModelInferRequest"."""
    return _classes()[f"{PACKAGE}.{name}"]


@functools.cache
def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="noria_open_inference.proto", package=PACKAGE, syntax="proto3")
    enum = file.enum_type.add(name="DataType")
    for value_name, number in _DATA_TYPES.items():
        enum.value.add(name=value_name, number=number)
    by_name: dict[str, Any] = {}
    for name in sorted(_MESSAGES, key=lambda each: each.count(".")):
        outer, _, inner = name.rpartition(".")
        described = by_name[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=inner)
        by_name[name] = described
    for name, fields in _MESSAGES.items():
        for field_name, (number, kind) in fields.items():
            _add_field(by_name[name], name, field_name, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return classes


def _add_field(described: Any, owner: str, name: str, number: int, kind: str) -> None:
    proto = descriptor_pb2.FieldDescriptorProto
    field = described.field.add(name=name, number=number, label=proto.LABEL_OPTIONAL)
    if kind.startswith("map "):
        entry_name = f"{name.title()}Entry"
        entry = described.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, f"{owner}.{entry_name}", "key", 1, "string")
        _add_field(entry, f"{owner}.{entry_name}", "value", 2, kind.removeprefix("map "))
        kind = f"*{owner}.{entry_name}"
    if kind.startswith("oneof "):
        if not described.oneof_decl:
            described.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind.startswith("*"):
        field.label = proto.LABEL_REPEATED
    kind = kind.removeprefix("*").removeprefix("oneof ")
    if kind in _MESSAGES or kind.endswith("Entry") or kind == "DataType":
        field.type_name = f".{PACKAGE}.{kind}"
        field.type = proto.TYPE_ENUM if kind == "DataType" else proto.TYPE_MESSAGE
    else:
        field.type = getattr(proto, f"TYPE_{kind.upper()}")
