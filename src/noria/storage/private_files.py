"""Folders and files that only their owner reads: prompts, images and secrets are in them."""

import logging
import os
import pathlib

_OTHERS = 0o077  # the rights of the group and of all others

log = logging.getLogger("noria.jobs")


def make_private_folder(folder: pathlib.Path) -> None:
    """Create `folder` and its missing parents for their owner only. Raises OSError."""
    if not folder.parent.exists():
        make_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def make_own_folder(folder: pathlib.Path) -> None:
    """Create `folder` for its owner only, or check an existing one: code and models in it must be nobody else's.

    Raises:
        OSError: it cannot be created, or other users can change what is in it.

    """
    make_private_folder(folder)
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be changed by other users")


def create_private_file(file: pathlib.Path) -> None:
    """Create an empty file for its owner only, unless it exists. Raises OSError."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))


def warn_if_open_to_others(folder: pathlib.Path) -> None:
    """Log a warning if an existing `folder` of data is open to others; they may be meant to read it, so it stays so."""
    mode = folder.stat().st_mode & 0o7777
    if mode & _OTHERS:
        log.warning(
            "the data folder %s has the mode %o: other users of this machine may read prompts and images in it; "
            "chmod -R go= %s",
            folder,
            mode,
            folder,
        )
