"""An engine's receiver for tests."""

from noria.engine.receiver import RequestReceiver


class EndingReceiver(RequestReceiver):
    """Ends with its test; an engine's receiver lasts as long as its process."""

    def stop(self):
        """End the compiler; the channel's `close` ends the thread that calls `receive`."""
        self._preparer._thread.shutdown()
