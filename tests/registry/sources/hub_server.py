"""A hub on loopback: the part of its API that huggingface_hub asks to list and read a repository."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "org/shapes"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class HubServer:
    """Serves the files of a folder as `REPO`, each revision the same; notes which paths are read."""

    def __init__(self, folder):
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.read, self.tokens = [], set()
        self.stalls_at, self.is_stalled, self.goes_on = None, threading.Event(), threading.Event()
        self.replaced = {}  # what is sent instead of what is listed
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request):
        self.tokens.add(request.headers.get("Authorization"))
        path = unquote(urlsplit(request.path).path)
        api, resolve = f"/api/models/{REPO}", f"/{REPO}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(api).removeprefix("/revision/") or "main"
            commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
            if commit is not None:
                return send(request, json.dumps({"id": REPO, "sha": commit, "private": False, "siblings": []}).encode())
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            is_recursive = "recursive=true" in request.path.casefold()
            found = [entry for entry in self._tree() if is_below(entry["path"], folder, is_recursive=is_recursive)]
            return send(request, json.dumps(found).encode())
        elif path.startswith(resolve):
            return self._send_file(request, path.removeprefix(resolve).partition("/")[2])
        code = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
        return send(request, b"{}", 404, {"X-Error-Code": code})

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
            send(request, content[: len(content) // 2], length=len(content))
            self.is_stalled.set()
            self.goes_on.wait()
        else:
            send(request, content)


def is_below(path, folder, *, is_recursive):
    inside = path.removeprefix(f"{folder}/") if folder else path
    return (not folder or inside != path) and (is_recursive or "/" not in inside)


def send(request, content, status=200, headers=None, length=None):
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(content) if length is None else length))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)
        request.wfile.flush()
