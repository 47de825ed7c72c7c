"""Data: graphs, datasets, and how a graph is partitioned among parties."""
