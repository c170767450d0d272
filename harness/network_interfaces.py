"""The network interface by which this machine reaches another (Linux)."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

ROUTES = Path("/proc/net/route")
SIOCGIFADDR = 0x8915  # asks for the address of an interface


def interface_to(host: str, port: int) -> str:
    """The network interface by which this machine reaches a host, or others at all where the host is itself; ""
    where neither is known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if name != "lo" and _address(name) == address:
                return name
    if not ROUTES.is_file():
        return ""
    routes = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    return next((fields[0] for fields in routes if fields[1:2] == ["00000000"]), "")


def _address(interface: str) -> str:
    """The IPv4 address of an interface; "" without one."""
    import fcntl

    question = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        return socket.inet_ntoa(fcntl.ioctl(query.fileno(), SIOCGIFADDR, question)[20:24])
    return ""
