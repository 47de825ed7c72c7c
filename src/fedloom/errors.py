"""What goes wrong because of what a user gave: one line that names the field and the valid choices."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedloomError(ValueError):
    """Base of every error that is not the program's fault, but the input's. The command line prints it and exits with 2."""


class DataError(FedloomError):
    """A dataset, file or graph that cannot be used as it is."""


class ConfigError(FedloomError):
    """A setting that does not exist or has a value it cannot have."""


class MessageError(FedloomError):
    """A message that breaks the rules of the wire: the text names the tensor."""


class Refusal(MessageError):  # noqa: N818
    """A client refuses a request, because answering could expose its or a peer's data."""


class RoundFailed(FedloomError):  # noqa: N818
    """Too few clients answered, and asking again did not help: nobody's input is wrong. The command line exits with 1."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist: says what was asked for, the nearest name, and all valid ones."""
    valid = sorted(choices)
    near = get_close_matches(name.lower(), valid, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(valid)}")
