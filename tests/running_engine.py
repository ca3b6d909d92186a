"""An engine's threads around the runtime of a test, with a real channel and clients with sockets of their own."""

import threading
import time

from engine_client import Client
from noria.engine.engines import StepEngine
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.monitoring.watchdog import HangWatchdog
from noria.engine.receiver import RequestReceiver
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.transport import EngineChannel
from waiting import TIMEOUT_S


class EndingReceiver(RequestReceiver):
    """Ends with its test; an engine's receiver lasts as long as its process."""

    def stop(self):
        """End the compiler; the channel's `close` ends the thread that calls `receive`."""
        self._preparer._thread.shutdown()


class RunningEngine:
    """An engine that holds `models`; it loads until `start`. `close` ends it and its clients.

    With `ends_channel`, it closes its channel as soon as it ends, as its process would.
    """

    def __init__(self, folder, models, *, name="engine-0", tracer=GLOBAL_TRACER, ends_channel=False, **options):
        self.address, self.journal = f"ipc://{folder}/{name}", folder / f"{name}-in-flight"
        self.channel, self.watchdog = EngineChannel(self.address), HangWatchdog(60.0, time.monotonic)
        self.receiver = EndingReceiver(
            self.channel,
            models,
            "cpu",
            watchdog=self.watchdog,
            crash_journal=CrashJournal(self.journal),
            tracer=tracer,
            **options,
        )
        self.name, self.tracer, self.ends_channel = name, tracer, ends_channel
        self.engine, self.clients = None, []
        self.receiver.start()

    def start(self, runtime, engine_class=StepEngine):
        """Let it serve."""
        self.engine = engine_class(self.name, self.channel, self.receiver, runtime, self.tracer)
        self.receiver.set_ready(runtime)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        self.engine.run()
        if self.ends_channel:
            self.channel.close()

    def connect(self):
        """Return a new client."""
        self.clients.append(Client(self.address))
        return self.clients[-1]

    def stop(self):
        """End it, as the supervisor's order does."""
        self.engine.stop()

    def close(self):
        if self.engine is not None:
            self.engine.stop()
            self.thread.join(TIMEOUT_S)
        self.receiver.stop()
        for client in self.clients:
            client.close()
        if not self.ends_channel:
            self.channel.close()
