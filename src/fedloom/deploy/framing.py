"""Bytes through a socket, with their length in front: between a process that Flower starts for a message and a party that stays."""

from __future__ import annotations

import socket

from fedloom.errors import MessageError

LIMIT = 2**31  # bytes at once


def send_frame(wire: socket.socket, data: bytes) -> None:
    """Sends bytes."""
    wire.sendall(len(data).to_bytes(8, "big") + data)


def receive_frame(wire: socket.socket) -> bytes:
    """What the other end has `put`. ConnectionError if it breaks off, MessageError if it is too long."""
    size = int.from_bytes(_exactly(wire, 8), "big")
    if size > LIMIT:
        raise MessageError(f"pipe: {size} bytes, more than the limit of {LIMIT}")
    return _exactly(wire, size)


def _exactly(wire: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        if not (part := wire.recv(min(left, 2**20))):
            raise ConnectionError("the other end has hung up")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
