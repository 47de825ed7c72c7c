"""The stacked engine: clients in lockstep, equal operations batched. All about stacking is here."""

from fedloom.engines.stacked.engine import Engine as Engine
