"""Checks that are made when code is loaded: one sentence names the file and the line."""

import asyncio
import os
import socket
import subprocess
import sys
import threading

import msgspec
import pytest

from noria.config import Config, EndpointConfig
from noria.errors import ConfigError
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.frontend.user_code.event_loop import UserEventLoop
from noria.frontend.user_code.loading import load_code
from noria.protocol.tasks import FrontendTask
from noria.statistics.variables import code_variables
from noria.user_code import Context


def load(file, class_name="Code", load_timeout_s=60.0):
    config = EndpointConfig("captions", f"{file}:{class_name}", load_timeout_s=load_timeout_s)
    user_loop = UserEventLoop()
    try:
        return asyncio.run(load_code(config, Context("captions", file.parent, {}, None), user_loop))
    finally:
        user_loop.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\nclass Code:\n    def preprocess(self, body, state) return 1", "line 3: SyntaxError: expected ':'"),
        ("import os\nimport noo_such_module\nclass Code: pass", "line 2: ModuleNotFoundError: No module named"),
        ("class Cod:\n    pass", "has no class 'Code'. Did you mean 'Cod'? It has Cod."),
        ("Code = 5", "has no class 'Code'. It has none."),
        ("class Code:\n    def __init__(self):\n        1 / 0", "line 3: ZeroDivisionError: division by zero"),
        ("\n\nclass Code:\n    def pre_process(self, body, state): pass", "line 3: the class Code has neither"),
        (
            "class Code:\n    def preprocess(self, body): pass",
            "line 2: preprocess(body) cannot be called as preprocess(self, body, state)",
        ),
        ("class Code:\n    def postprocess(self, result, state): yield 1", "line 2: postprocess must be a method"),
        ("class Code:\n    preprocess = 5", "preprocess must be a method that returns its result"),
        (
            "class Code:\n    def preprocess(self, body, state): pass\n    def load(self, ctx):\n        open('/no')",
            "line 4: FileNotFoundError",
        ),
        (
            "class Code:\n    def preprocess(self, body, state): pass\n"
            "    async def load(self, ctx):\n        raise SystemExit(2)",
            "line 4: SystemExit: 2",
        ),
        (
            "class Code:\n    statistics = {'a': (2, 1)}\n    def preprocess(self, body, state): pass",
            "line 1: a: [2.0, 1.0]; edges are one or more finite numbers, each above the one before",
        ),
        (
            "class Code:\n    statistics = 5\n    def preprocess(self, body, state): pass",
            "statistics is 5; allowed is a dict",
        ),
        ("raise SystemExit", "line 1: SystemExit"),
    ],
)
def test_code_that_cannot_be_used_is_rejected_with_file_and_line(tmp_path, text, says):
    (tmp_path / "code.py").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "code.py")
    message = raised.value.message
    assert message.startswith(f"endpoint 'captions': {tmp_path / 'code.py'}")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(("method", "wait"), [("def", "threading.Event().wait(2)"), ("async def", "await sleep(20)")])
def test_code_that_does_not_finish_loading_is_rejected_and_the_code_of_before_stays(tmp_path, method, wait):
    file, method_text = tmp_path / "code.py", "    def preprocess(self, body, state): pass\n"
    file.write_text(f"class Code:\n{method_text}")
    load(file)
    module = sys.modules["noria_endpoint_captions"]
    file.write_text(
        f"import threading\nfrom asyncio import sleep\nclass Code:\n{method_text}    {method} load(self, ctx): {wait}\n"
    )
    with pytest.raises(ConfigError, match=r"Code was not loaded within 0.2 s.*load_timeout_s"):
        load(file, load_timeout_s=0.2)
    assert sys.modules["noria_endpoint_captions"] is module
    for thread in threading.enumerate():
        if thread.name.startswith("user-code"):
            thread.join(60)


def test_a_file_that_is_missing_or_that_others_can_change_is_rejected(tmp_path):
    file = tmp_path / "code.py"
    with pytest.raises(ConfigError, match="No such file"):
        load(file)
    file.write_text("class Code:\n    def preprocess(self, body, state): pass\n")
    file.chmod(0o664)
    with pytest.raises(ConfigError, match=r"can be changed by other users.*chmod go-w"):
        load(file)
    file.chmod(0o644)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"its folder .* can be changed by other users"):
        load(file)
    tmp_path.chmod(0o1777)
    load(file)
    with pytest.raises(ConfigError):
        load(tmp_path)


def test_nothing_is_written_beside_the_file_and_its_dataclasses_work(tmp_path):
    (tmp_path / "code.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Code:\n    a: int = 5\n    def preprocess(self, body, state): return self.a\n"
    )
    assert load(tmp_path / "code.py").preprocess.function({}, None) == 5
    assert os.listdir(tmp_path) == ["code.py"]


def test_a_statistic_keeps_its_buckets():
    statistics = StatisticsRecorder()
    statistics.declare_code("buckets", code_variables({"kept_a": (1.0,), "kept_b": (2.0,)}))
    statistics.declare_code("buckets", code_variables({"kept_a": (1.0,)}))
    with pytest.raises(ConfigError, match=r"endpoint 'buckets': the variable kept_b .* since the start it is a scalar"):
        statistics.declare_code("buckets", code_variables({"kept_b": (3.0,)}))


def test_a_front_end_does_not_start_with_code_that_cannot_be_loaded(tmp_path, folder):
    (tmp_path / "code.py").write_text("class Code:\n    def preprocess(self): pass\n")
    config = Config(
        data_dir=str(tmp_path / "data"), log_format="text", endpoints=(EndpointConfig("a", f"{tmp_path}/code.py:Code"),)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = msgspec.json.encode(FrontendTask(config, listener.fileno(), [f"ipc://{folder}/nobody"])).decode()
        command = [sys.executable, "-m", "noria.frontend.process", task]
        done = subprocess.run(
            command, pass_fds=[listener.fileno()], capture_output=True, text=True, check=False, timeout=120
        )
    assert done.returncode == ConfigError.exit_status
    assert f"{tmp_path}/code.py, line 2: preprocess() cannot be called as" in done.stderr
    assert len(done.stderr.splitlines()) == 1
