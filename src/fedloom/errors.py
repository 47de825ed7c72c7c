"""Errors that the user's input causes. Each has a one-line message.

A message names the field and the valid choices.
"""

from collections.abc import Iterable


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


class SecondWriterError(DataError):
    """Another process has written to a file of this run. This process writes no more to it."""


class NotFiniteError(MessageError):
    """A message with a number that is not finite, or too large to travel."""


class Refusal(MessageError):  # noqa: N818
    """A client refuses a request, because the answer could expose its data or a peer's data."""


class RoundFailed(FedloomError):  # noqa: N818
    """Too few clients answered, and asking again did not help.

    The input is not the cause. The command line exits with 1.
    """


def unknown(kind: str, name: str, choices: Iterable[str]) -> ConfigError:
    """Returns the error for a name that does not exist.

    The message contains the name, a valid name if one is nearly the same, and all valid names.

    Args:
        kind: What the name stands for, such as "dataset".
        name: The name that was given.
        choices: All names that are valid here.
    """
    valid = sorted(choices)
    return ConfigError(f"unknown {kind} {name!r}.{hint(name, valid)} Valid: {', '.join(valid)}")


def hint(name: str, choices: Iterable[str]) -> str:
    """Returns " Did you mean 'NAME'?" for the nearest of the choices; "" if none is near.

    A choice is near if a typing error explains the difference: a letter added, left out, replaced
    or exchanged with the next one; two of these in a name of five letters or more, three in a name
    of ten or more.

    Args:
        name: The name that was given.
        choices: All names that are valid here.
    """
    given = name.lower()
    distances = {choice: _edits(given, choice.lower()) for choice in choices}
    nearest = min(distances, key=lambda choice: (distances[choice], choice), default=None)
    allowed = 1 if len(given) < 5 else 2 if len(given) < 10 else 3
    if nearest is None or distances[nearest] > allowed or len(nearest) <= distances[nearest]:
        return ""
    return f" Did you mean {nearest!r}?"


def _edits(one: str, other: str) -> int:
    """Returns the number of edits between two texts.

    An edit adds, removes or replaces a letter, or exchanges it with the next one.
    """
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            least = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and wanted == one[i - 2]:
                least = min(least, before[j - 2] + 1)
            row.append(least)
        before, last = last, row
    return last[-1]
