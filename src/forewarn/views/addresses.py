"""Which addresses a server answers to."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")


def host_of(header: str) -> str:
    """The host in a Host header, without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if name.count(":") == 1 else name


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at this address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_own(host: str, bound: str) -> bool:
    """Whether a server bound to an address was asked by its own name; any other could be that of a hostile page."""
    if host in LOOPBACK or host == bound.lower():
        return True
    name = socket.gethostname().lower()
    return bound in EVERYWHERE and (_is_address(host) or host == name or host.startswith(f"{name}."))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
