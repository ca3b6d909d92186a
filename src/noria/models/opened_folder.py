"""A folder below folders that an operator allows, with no link that leads out of them, whatever changes meanwhile.

Its files are opened, and where each descriptor really is, is checked; no name is looked up twice. Libraries open files
by their names, so what they get is a temporary folder whose links lead to these descriptors.
"""

import contextlib
import os
import pathlib
import resource
import stat
import tempfile
from collections.abc import Iterator, Sequence

from noria.errors import ModelError, NoriaError

_MAX_ENTRIES = 10_000  # files and folders, as many as are copied of a source
_SPARE_DESCRIPTORS = 100  # for the process itself


def is_below(path: pathlib.Path, roots: Sequence[str]) -> bool:
    """Return whether a path, without links, is below one of the roots, which may be links."""
    return any(path.is_relative_to(os.path.realpath(root)) for root in roots if root.startswith("/"))


@contextlib.contextmanager
def opened_folder(folder: pathlib.Path, roots: Sequence[str]) -> Iterator[pathlib.Path]:
    """Give a folder of the same name and with the same files, which stay those that they are now.

    Errors of the context name `folder`.

    Raises ModelError: a link in the folder leads out of the roots, or the folder cannot be read.
    """
    _allow_descriptors()
    with contextlib.ExitStack() as descriptors, tempfile.TemporaryDirectory(prefix="noria-model-") as temporary:
        shown = pathlib.Path(temporary, folder.name or "model")
        try:
            _open_all(folder, shown, roots, descriptors)
        except OSError as error:
            raise ModelError(f"{error.filename or folder}: cannot be read: {error.strerror}.") from error
        try:
            yield shown
        except NoriaError as error:
            error.message = error.message.replace(str(shown), str(folder))
            error.args = (error.message,)
            raise


def _open_all(
    folder: pathlib.Path, shown: pathlib.Path, roots: Sequence[str], descriptors: contextlib.ExitStack
) -> None:
    """Make `shown` with links to the opened files of `folder`, whose descriptors stay open."""
    waiting = [(folder, shown, _open(str(folder), None, folder, roots, descriptors))]
    num_entries = 0
    while waiting:
        path, target, descriptor = waiting.pop()
        target.mkdir()
        for name in sorted(os.listdir(f"/proc/self/fd/{descriptor}")):
            if name.startswith("."):
                continue  # no part of a model
            num_entries += 1
            if num_entries > _MAX_ENTRIES:
                raise ModelError(f"{folder}: has more than {_MAX_ENTRIES} files and folders.")
            entry = path / name
            opened = _open(name, descriptor, entry, roots, descriptors)
            if not stat.S_ISDIR(os.fstat(opened).st_mode):
                (target / name).symlink_to(f"/proc/self/fd/{opened}")
            elif stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                raise ModelError(f"{entry}: a symbolic link to a folder. Put the folder itself here, or remove it.")
            else:
                waiting.append((entry, target / name, opened))


def _open(
    name: str, within: int | None, path: pathlib.Path, roots: Sequence[str], descriptors: contextlib.ExitStack
) -> int:
    """Return a descriptor of what a name leads to. Raises ModelError: that is not below a root."""
    opened = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=within)  # which reads nothing, and never blocks
    descriptors.callback(os.close, opened)
    if not is_below(pathlib.Path(os.readlink(f"/proc/self/fd/{opened}")), roots):
        raise ModelError(
            f"{path}: a link that leads out of registry.source_roots. Put the file itself there, or remove the link."
        )
    return opened


def _allow_descriptors() -> None:
    """Let this process have as many files open as a folder may have, where the system allows that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_ENTRIES + _SPARE_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
