"""How near the results of a model in a faster form are to those before: measured once, and kept in a file."""

import logging
import pathlib

import msgspec

from noria.storage.private_files import make_own_folder

_log = logging.getLogger(__name__)


class Fidelity(msgspec.Struct, frozen=True):
    """How near the results are, 1 being equal."""

    min: float
    mean: float
    num_samples: int

    def __str__(self) -> str:
        """Return it as messages and `noria doctor` show it."""
        return f"min {self.min:.5f}, mean {self.mean:.5f} on {self.num_samples} samples"


def read_fidelity(file: pathlib.Path) -> Fidelity | None:
    """Return an earlier measurement, if there is one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Fidelity)
    except (OSError, msgspec.DecodeError):
        return None


def write_fidelity(file: pathlib.Path, fidelity: Fidelity) -> None:
    """Keep a measurement; a failure is logged."""
    try:
        make_own_folder(file.parent)
        file.write_bytes(msgspec.json.encode(fidelity))
    except OSError as error:
        _log.warning("the measured fidelity cannot be kept: %s", error)
