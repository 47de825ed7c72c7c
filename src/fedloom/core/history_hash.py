"""The history hash: a digest of every exchange of a run, both ways."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.core.message import Batch, Message, flatten
from fedloom.core.replies import Replies
from fedloom.core.shared_rows import SharedRows

SUMMED_FROM = 4096  # tensors of at least this many bytes are hashed by their sums
EMPTY = hashlib.sha256(b"fedloom").digest()
# What replies hold besides what the hash covers, by phase: metrics that follow from the same
# predictions, and the training loss. Which of them a run wants does not change its hash.
NOT_HASHED: Mapping[str, tuple[str, ...]] = {
    "evaluate": ("probabilistic", "loss"),
    "evaluate_sum": ("more", "confusion", "loss"),
}


def chained(
    before: bytes,
    round: int,
    phase: str,
    messages: Mapping[str, Message],
    replies: Mapping[str, Message],
) -> bytes:
    """Chains an exchange into a history hash: clients, names and every tensor, both ways.

    The tensors in `NOT_HASHED` are left out.
    """
    left_out = NOT_HASHED.get(phase, ())
    digests: dict[int, bytes] = {}  # a tensor that many receive is hashed once
    entries: dict[int, list[bytes]] = {}
    chain = hashlib.sha256(before + f"{round} {phase}".encode())
    for direction, side in (("down", messages), ("up", replies)):
        if isinstance(side, Replies) and isinstance(side.messages, Batch):
            batch = side.messages
            senders = f"{direction} {batch.clients}"
            for name, stack in batch.stacks.items():
                if name in left_out:
                    continue
                head = f"{senders} {name} {stack.dtype} {list(stack.shape)}"
                if isinstance(stack, SharedRows):
                    chain.update(head.encode() + stack.sharing.digest + fingerprint(stack.stored))
                else:
                    chain.update(head.encode() + fingerprint(stack))
            continue
        for client, content in side.items():
            if id(content) not in entries:
                flat = {n: t for n, t in flatten(content).items() if n not in left_out}
                for t in flat.values():
                    if id(t) not in digests:
                        digests[id(t)] = fingerprint(t)
                entries[id(content)] = [
                    f" {name} {t.dtype} {list(t.shape)}".encode() + digests[id(t)]
                    for name, t in flat.items()
                ]
            receiver = f"{direction} {client}".encode()
            chain.update(b"".join([receiver + entry for entry in entries[id(content)]]))
    return chain.digest()


def fingerprint(tensor: Tensor) -> bytes:
    """Returns 32 bytes that distinguish tensors of one shape.

    A small tensor is hashed as it is. A large tensor is seen as 64-bit words, 64 to a row, and the
    sums of all rows and of all columns are hashed. That is a few times faster than hashing all
    bytes. Other values, or the same values in another order, change some of the sums. It is no
    protection against an adversary that wants two runs to agree.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # a slice may begin where no 64-bit word may
    if not len(flat):
        return hashlib.sha256(b"").digest()  # an empty tensor may have any stride
    raw = flat.view(torch.uint8)
    if len(raw) < SUMMED_FROM:
        return hashlib.sha256(raw.numpy().data).digest()
    whole = len(raw) // 512 * 512
    words = raw[:whole].view(torch.int64).view(-1, 64)  # sums are modulo 2^64
    return hashlib.sha256(
        b"".join(part.numpy().tobytes() for part in (words.sum(0), words.sum(1), raw[whole:]))
    ).digest()
