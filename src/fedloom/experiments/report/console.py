"""The consoles of the commands: results go to stdout, everything else to stderr."""

import sys

from rich.console import Console

# Tables keep their columns if the output is a pipe or a file.
out = Console(width=None if sys.stdout.isatty() else 160, markup=False)
err = Console(stderr=True, markup=False, soft_wrap=True)
