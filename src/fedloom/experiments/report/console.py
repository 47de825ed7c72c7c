"""The consoles of the commands: results go to stdout, everything else to stderr."""

from rich.console import Console

WIDE = 400  # columns of `--wide`, enough for every table

out = Console(markup=False, highlight=False)
err = Console(stderr=True, markup=False, soft_wrap=True)


def stdout(wide: bool = False) -> Console:
    """Returns the console of results: as wide as the terminal, or as wide as the tables."""
    return Console(markup=False, highlight=False, width=WIDE) if wide else out
