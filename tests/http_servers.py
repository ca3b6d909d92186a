"""HTTP servers of tests, on loopback: a function answers the requests."""

import http.server
import json
import sys
import threading


class Request(http.server.BaseHTTPRequestHandler):
    """A request, with its `body`, which a function answers by `send`; if it does not, it sets `close_connection`."""

    protocol_version = "HTTP/1.1"
    wbufsize = 65_536  # an answer is one packet

    def _answer(self):
        self.body = self.rfile.read(int(self.headers["content-length"] or 0))
        self.server.answer(self)

    do_GET = do_HEAD = do_POST = do_DELETE = _answer

    @property
    def json(self):
        return json.loads(self.body)

    def send(self, content=b"", status=200, headers=None, length=None):
        """Send bytes, or a value as JSON; `length` is what is said of their number, if not their number."""
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            self.wfile.flush()

    def log_message(self, *_):
        pass


class HttpServer(http.server.ThreadingHTTPServer):
    """Answers by `answer(request)`; as a context, in a thread of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Request)
        self.answer, self.url = answer, f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, *details):
        if not isinstance(sys.exception(), ConnectionError):  # clients give up
            super().handle_error(*details)
