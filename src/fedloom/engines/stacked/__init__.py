"""The stacked engine: whole groups of clients at once. All about stacking is here."""

from fedloom.engines.stacked.engine import Engine as Engine
