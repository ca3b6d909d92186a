"""Folders that fsspec reads: the hub, object stores, memory. Blocks."""

from collections.abc import Iterator
from typing import Any

from noria.errors import ModelError
from noria.observe.logs.redaction import redact
from noria.registry.sources.remote_folder import CHUNK_BYTES, RemoteFile, RemoteFolder, check_num_entries, one_line
from noria.registry.sources.source import HubSource

_CONTENT_KEYS = frozenset(
    {"ETag", "etag", "md5Hash", "crc32c", "generation", "VersionId", "version_id", "blob_id", "sha"}
    | {"mtime", "modify", "LastModified", "last_modified", "modificationTime"}
)
"""Keys of filesystems' facts about a file that change with its content. The time of the last access is none of them."""


def open_hub(source: HubSource) -> RemoteFolder:
    """List a repository at the commit that its revision is now.

    Raises ModelError: there is no such repository or revision, or the hub does not answer.
    """
    # These take half a second, which other sources need not spend.
    from huggingface_hub import HfApi, constants

    name = f"hf://{source.repo}" + (f"@{source.revision}" if source.revision else "")
    try:
        commit = HfApi().model_info(source.repo, revision=source.revision).sha
    except Exception as error:  # hub and network raise many kinds; people read one sentence
        raise ModelError(
            f"{name} cannot be read from {constants.ENDPOINT}: {one_line(error)}. Check the name, the "
            "network, HF_TOKEN and HF_HUB_OFFLINE; or copy the model's folder to this machine, and add that."
        ) from error
    return open_filesystem(f"hf://{source.repo}@{commit}", commit, block_size=0)  # 0: one request for a file


def open_filesystem(url: str, revision: str | None = None, **how_to_open: Any) -> RemoteFolder:
    """List a folder by its URL.

    Raises ModelError: there is no such folder, its filesystem is unknown or needs a package, or it has links.
    """
    from fsspec.core import url_to_fs

    try:
        filesystem, folder = url_to_fs(url)
        folder = folder.rstrip("/")
        found = sorted(_walk(filesystem, folder, url), key=lambda file: file.path)
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"{url} needs a package that is missing: {redact(str(error))}.") from error
    except Exception as error:  # fsspec's filesystems share no base class of errors
        raise ModelError(
            f"{url} cannot be read: {one_line(error)}. Check the URL, the network and credentials."
        ) from error

    def read(path: str) -> Iterator[bytes]:
        with filesystem.open(f"{folder}/{path}", "rb", **how_to_open) as opened:
            while chunk := opened.read(CHUNK_BYTES):
                yield chunk

    return RemoteFolder(url, revision, tuple(found), read)


def _walk(filesystem: Any, root: str, url: str) -> Iterator[RemoteFile]:
    """Yield the files below a folder. `find` would list all of a bucket first, and `walk` leave out what fails."""
    folders, num_entries = [root], 0
    for folder in folders:
        for info in filesystem.ls(folder, detail=True):
            name, is_folder = info["name"].rstrip("/"), info.get("type") == "directory"
            num_entries += 1
            check_num_entries(num_entries, url)
            if name == folder:
                continue  # the empty object that an object store's console makes as a folder; or the URL is a file's
            if is_folder:
                folders.append(name)
            elif info.get("size") or not info["name"].endswith("/"):  # such an object again
                yield _file(info["name"].removeprefix(f"{root}/"), info, url)


def _file(path: str, info: dict[str, Any], url: str) -> RemoteFile:
    if info.get("type") != "file" or info.get("islink"):
        raise ModelError(f"{url} has {path}, which is a link or a device. Put the file itself there, or remove it.")
    if not isinstance(info.get("size"), int):
        raise ModelError(f"{url}: its filesystem does not say how large {path} is. Download the folder, and add that.")
    lfs = info.get("lfs")  # stated by the hub
    stated = {key: value for key, value in info.items() if key in _CONTENT_KEYS} or info
    state = repr(sorted((key, str(value)) for key, value in stated.items()))
    return RemoteFile(path, info["size"], lfs["sha256"] if lfs else None, state)
