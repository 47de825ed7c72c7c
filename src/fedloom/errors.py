"""Errors that the user's input causes. Each has a one-line message.

A message names the field and the valid choices.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FedloomError(ValueError):
    """Base class of all errors that the input causes, not the program.

    The command line prints the message and exits with 2.
    """


class DataError(FedloomError):
    """A dataset, file or graph that cannot be used as it is."""


class ConfigError(FedloomError):
    """A setting that does not exist, or a value that it cannot have."""


class MessageError(FedloomError):
    """A message that breaks the rules of the wire. The text names the tensor."""


class Refusal(MessageError):  # noqa: N818
    """A client refuses a request, because the answer could expose its data or a peer's data."""


class RoundFailed(FedloomError):  # noqa: N818
    """Too few clients answered, and asking again did not help.

    The input is not the cause. The command line exits with 1.
    """


def unknown(kind: str, name: str, choices: Iterable[str]) -> ConfigError:
    """Returns the error for a name that does not exist.

    The message contains the name, the nearest valid name, and all valid names.

    Args:
        kind: What the name stands for, such as "dataset".
        name: The name that was given.
        choices: All valid names.
    """
    valid = sorted(choices)
    near = get_close_matches(name.lower(), valid, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(valid)}")
