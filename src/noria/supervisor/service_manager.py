"""Messages to the service manager, by the protocol of sd_notify(3)."""

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send `state`, such as READY=1, to the socket that the manager named; do nothing if it named none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)  # one that does not read must not keep the server from stopping
            manager.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            manager.send(state.encode())
