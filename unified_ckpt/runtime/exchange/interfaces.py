"""Chooses the network address at which other nodes reach this rank.

Interfaces are read as torch's Gloo does: `GLOO_SOCKET_IFNAME` lists exact names, and several take
turns. Without it, the address is the one from which this node reaches the store of the job.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.comm.comm import process_group_store

_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_IPV4_ADDRESS = 0x8915  # SIOCGIFADDR
_IFREQ = struct.Struct("16s 4x 4s 16x")  # name; family and port; IPv4 address
_IPV6_ADDRESSES = "/proc/net/if_inet6"
_DISCARD_PORT = 9  # nothing is sent to it


def listening_host() -> str:
    """Return the address of this rank for other nodes.

    StorageError if an interface of `GLOO_SOCKET_IFNAME` has none, or the store cannot be reached.
    """
    names = [name.strip() for name in os.environ.get(_VARIABLE, "").split(",") if name.strip()]
    if not names:
        return _host_toward(store_host() or socket.gethostname())
    hosts = [_interface_host(name) for name in names]
    return hosts[int(os.environ.get("LOCAL_RANK", "0")) % len(hosts)]


def reachable_host(host: str) -> str:
    """Return the host by which this node reaches a listener.

    Rank 0's node may resolve its own name to a loopback address (Debian's /etc/hosts). Only there
    does the route to the store use a loopback address, so others use the store's host.
    """
    return (store_host() or host) if ipaddress.ip_address(host).is_loopback else host


def store_host() -> str | None:
    """Return the host of the job's store, None if it has none: files, or one process."""
    store: object = process_group_store()
    if store is None:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")


def _host_toward(host: str) -> str:
    """Return the address from which this node reaches a host, without sending anything."""
    try:
        infos = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise _unreachable(host, error) from error
    for family, kind, protocol, _, socket_address in infos:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(socket_address)
                return str(probe.getsockname()[0])
            except OSError as error:  # the host may have IPv6, and this node may not
                failure = error
    raise _unreachable(host, failure) from failure


def _unreachable(host: str, error: OSError) -> StorageError:
    return StorageError(
        f"the store's host {host!r}: cannot be reached: {error.strerror}; set MASTER_ADDR to an "
        f"address of rank 0's node, or {_VARIABLE} to an interface"
    )


def _interface_host(name: str) -> str:
    """Return an interface's first usable address."""
    if host := next(_hosts(name), None):
        return host
    interfaces = [name for _, name in socket.if_nameindex()]
    problem = "has no address that other nodes reach" if name in interfaces else "does not exist"
    usable = {
        interface: hosts for interface in interfaces if (hosts := ", ".join(_hosts(interface)))
    }
    listed = ", ".join(f"{interface} ({hosts})" for interface, hosts in usable.items())
    raise StorageError(
        f"{_VARIABLE}: interface {name!r} {problem} on host {socket.gethostname()}; expected exact "
        f"names, separated by commas, of: {listed}"
    )


def _hosts(interface: str) -> Iterator[str]:
    """Yield the addresses of an interface that are not link-local, IPv4 before IPv6."""
    for host in _all_hosts(interface):
        if not ipaddress.ip_address(host).is_link_local:
            yield host


def _all_hosts(interface: str) -> Iterator[str]:
    """Yield the IPv4 address of an interface, if any, then its IPv6 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            request = _IFREQ.pack(interface.encode()[:15], bytes(4))
            _, packed = _IFREQ.unpack(fcntl.ioctl(query, _GET_IPV4_ADDRESS, request))
            yield socket.inet_ntoa(packed)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
    try:
        with open(_IPV6_ADDRESSES) as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:  # no IPv6
        return
    yield from (
        str(ipaddress.ip_address(bytes.fromhex(row[0]))) for row in rows if row[5] == interface
    )
