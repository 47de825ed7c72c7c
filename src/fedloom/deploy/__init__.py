"""Across organisations: who takes part, how each proves who it is, and what their answers travel in."""
