from fedloom.engines.stacked.engine import Engine as Engine
