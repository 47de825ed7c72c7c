"""Methods: one paper, one file. `_shared` holds what several of them use."""
