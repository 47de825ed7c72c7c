"""`python -m fedloom` is the same as `fedloom`."""

from fedloom.cli import main

main()
