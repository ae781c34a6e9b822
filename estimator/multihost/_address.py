"""The "host:port" of a process, and whether it leads to other hosts."""

from __future__ import annotations

import ipaddress
import socket


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'initialize_distributed: coordinator_address must be "host:port"; got {address!r}.')
    return host.strip("[]"), int(port)


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name, as this host resolves it, leads back to this host by its loopback device."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(x.partition("%")[0]).is_loopback for x in addresses)


def is_literally_loopback(host: str) -> bool:
    """Not by what a name resolves to: process 0's own host may call itself 127.0.1.1, and the others know better."""
    return host == "localhost" or (host.replace(".", "").isdigit() or ":" in host) and is_loopback(host)
