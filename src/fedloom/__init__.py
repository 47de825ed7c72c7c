"""fedloom: graph neural networks over graphs that several parties hold and may not share."""
