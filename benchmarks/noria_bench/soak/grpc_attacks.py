"""Attacks of hostile clients on gRPC's port, with frames of their own: a library would keep calls back."""

import contextlib
import socket
import threading

from noria_bench.soak.attacks import connect

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_HEADERS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ROOT = b"/inference.GRPCInferenceService/"


def open_calls(client: socket.socket, method: str, num_calls: int, key: str | None = None, body: bytes = b"") -> None:
    """Begin HTTP/2 and `num_calls` calls, each with a message only if `body` is one; read nothing."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": _ROOT + method.encode(),
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    if key is not None:
        fields[b"x-api-key"] = key.encode()
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())
    frames = [_PREFACE, _frame(_SETTINGS, 0, 0, b"")]
    for stream in range(1, 2 * num_calls, 2):
        frames.append(_frame(_HEADERS, _END_HEADERS, stream, block))
        if body:
            frames.append(_frame(_DATA, 0, stream, b"\0" + len(body).to_bytes(4, "big") + body))
    client.sendall(b"".join(frames))


def calls_without_message(port: int, stopped: threading.Event) -> None:
    """Hold 10 connections with 30 calls each, whose messages never come; `port` is gRPC's."""
    with contextlib.ExitStack() as opened:
        for _ in range(10):
            with contextlib.suppress(OSError):
                open_calls(opened.enter_context(connect(port)), "ModelInfer", 30)
        stopped.wait()


def _string(text: bytes) -> bytes:
    assert len(text) < 127  # a length of one byte; RFC 7541, section 5.1
    return bytes([len(text)]) + text


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
