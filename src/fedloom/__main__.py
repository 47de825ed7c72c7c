"""`python -m fedloom`: the same as `fedloom`."""

from fedloom.cli import main

main()
