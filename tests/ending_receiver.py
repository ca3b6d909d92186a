"""An engine's receiver for tests."""

import contextlib

from noria.engine.receiver import RequestReceiver


class EndOfThread(Exception):
    """Raised where it is unpacked."""

    def __iter__(self):
        raise self


class EndingReceiver(RequestReceiver):
    """Ends with its test; an engine's receiver lasts as long as its process."""

    def run(self):
        with contextlib.suppress(EndOfThread):
            super().run()

    def stop(self):
        self._compiler.shutdown()
        self._channel.inbox.put(EndOfThread())
        self.join()
