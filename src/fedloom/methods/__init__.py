"""One file per method. A file put here is found by its name: nothing to register."""
