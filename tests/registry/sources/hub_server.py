"""A hub on loopback: the part of its API that huggingface_hub asks to list and read a repository."""

import hashlib
import threading
from urllib.parse import unquote, urlsplit

from http_servers import HttpServer

REPO = "org/shapes"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class HubServer:
    """Serves the files of a folder as `REPO`, each revision the same; notes which paths are read."""

    def __init__(self, folder):
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.read, self.tokens = [], set()
        self.stalls_at, self.is_stalled, self.goes_on = None, threading.Event(), threading.Event()
        self.replaced = {}  # what is sent instead of what is listed
        self._server = HttpServer(self.answer).__enter__()
        self.url = self._server.url

    def close(self):
        self.goes_on.set()
        self._server.__exit__()

    def answer(self, request):
        self.tokens.add(request.headers.get("Authorization"))
        path = unquote(urlsplit(request.path).path)
        api, resolve = f"/api/models/{REPO}", f"/{REPO}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(api).removeprefix("/revision/") or "main"
            commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
            if commit is not None:
                return request.send({"id": REPO, "sha": commit, "private": False, "siblings": []})
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            is_recursive = "recursive=true" in request.path.casefold()
            found = [entry for entry in self._tree() if is_below(entry["path"], folder, is_recursive=is_recursive)]
            return request.send(found)
        elif path.startswith(resolve):
            return self._send_file(request, path.removeprefix(resolve).partition("/")[2])
        code = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
        return request.send(b"{}", 404, {"X-Error-Code": code})

    def _tree(self):
        for folder in sorted({path.rpartition("/")[0] for path in self.files} - {""}):
            yield {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}
        for path, content in sorted(self.files.items()):
            oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"type": "file", "path": path, "size": len(content), "oid": oid}
            if path.endswith((".safetensors", ".bin")):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            yield entry

    def _send_file(self, request, path):
        self.read.append(path)
        content = self.replaced.get(path, self.files[path])
        if path == self.stalls_at:
            request.send(content[: len(content) // 2], length=len(content))
            self.is_stalled.set()
            self.goes_on.wait()
        else:
            request.send(content)


def is_below(path, folder, *, is_recursive):
    inside = path.removeprefix(f"{folder}/") if folder else path
    return (not folder or inside != path) and (is_recursive or "/" not in inside)
