"""Framing: sends bytes through a socket, with their length in front.

The short process that Flower starts for each message uses it to talk to the party's own process.
"""

from __future__ import annotations

import socket

from fedloom.errors import MessageError

LIMIT = 2**31  # bytes of a frame


def send_frame(wire: socket.socket, data: bytes) -> None:
    """Sends one frame."""
    wire.sendall(len(data).to_bytes(8, "big") + data)


def receive_frame(wire: socket.socket) -> bytes:
    """Returns the next frame that the other end sent.

    Raises ConnectionError if the connection ends too early, MessageError if the frame is too long.
    """
    size = int.from_bytes(_exactly(wire, 8), "big")
    if size > LIMIT:
        raise MessageError(f"frame: {size} bytes, more than the limit of {LIMIT}")
    return _exactly(wire, size)


def _exactly(wire: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        if not (part := wire.recv(min(left, 2**20))):
            raise ConnectionError("the other end closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
