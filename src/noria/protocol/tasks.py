"""The tasks of processes: each gets its own as JSON in its first argument, from the process that starts it.

`noria.supervisor.child_keeper` starts them, and sets `parent_pid`.
"""

import pathlib
import uuid
from typing import Literal

import msgspec

from noria.config import Config, EngineConfig
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import ExitCause
from noria.protocol.text import EncoderModelSpec


def engine_name(number: int) -> str:
    """The name of the engine of device `number` in logs, metrics, traces and `GET /v1/live`; it survives restarts."""
    return f"engine-{number}"


class EngineTask(msgspec.Struct, frozen=True):
    """The task of an engine."""

    config: EngineConfig
    models: tuple[AnyModelSpec, ...]  # the default model first
    device: str
    address: str
    name: str
    crash_journal: str  # path of the file that lists the requests in flight; it survives the process
    log_level: str = "info"
    traces_endpoint: str = ""
    parent_pid: int | None = None  # the process that keeps it, with which it ends
    previous_exit: ExitCause = "none"  # how the previous process of this engine ended
    fd: int | None = None  # a listening TCP socket for `address`, inherited
    secret_key_file: str = ""  # file of the channel's key; empty: it has none
    has_own_metrics: bool = False  # no front end exports the series that exist before the engine does
    niceness: int = 0  # added to the process's on a CPU, once the models are loaded

    @property
    def secret_key(self) -> str:
        """The channel's key, read from its file; empty: it has none."""
        return pathlib.Path(self.secret_key_file).read_text(encoding="ascii") if self.secret_key_file else ""


def random_worker_id() -> str:
    """The worker id of a front end that no supervisor restarts."""
    return f"{uuid.uuid4().hex}/frontend"


class FrontendTask(msgspec.Struct, frozen=True):
    """The task of a front end."""

    config: Config
    fd: int  # a listening socket, inherited
    engines: list[str]  # the addresses of their channels
    default_models: dict[str, str] = {}  # name of the model for requests that name none, by kind
    endpoint_models: dict[str, EncoderModelSpec] = {}  # models of `config.endpoints`, by the endpoint's name
    configured_versions: dict[str, str] = {}  # fingerprints of the configuration's models, by name
    registrar: str = ""  # the address of its reports to the registrar; empty: the server has none
    metrics_fd: int | None = None  # another listening socket, for /metrics alone
    control_fd: int | None = None  # a connection to the supervisor, inherited
    checkpoints: tuple[str, ...] = ()  # the names of files and folders in `config.engine.checkpoints`
    num_frontends: int = 1  # with this one
    start_reason: Literal["initial", "load", "restarted"] = "initial"
    parent_pid: int | None = None  # the process that keeps it, with which it ends
    # `server/name`, the same after a restart.
    worker_id: str = msgspec.field(default_factory=random_worker_id)

    @property
    def name(self) -> str:
        """The name of the process, such as `frontend-0`."""
        return self.worker_id.rpartition("/")[2]


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine is, and the kind of its models."""

    name: str
    address: str
    kind: str


class RegistrarTask(msgspec.Struct, frozen=True):
    """The task of the registrar."""

    config: Config
    engines: tuple[EngineAddress, ...]
    models: tuple[AnyModelSpec, ...]  # models of the configuration
    reports_address: str  # where it takes the front ends' reports
    owner: str  # holder of leases: the server's id, the same after a restart of the registrar
    checkpoints: tuple[str, ...] = ()  # as of `FrontendTask`
    parent_pid: int | None = None  # the process that keeps it, with which it ends
    control_fd: int | None = None  # a connection to it, inherited
