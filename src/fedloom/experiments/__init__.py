"""Experiments: runs and comparisons. Settings, recipes, run folders, grids, tuning and reports."""
