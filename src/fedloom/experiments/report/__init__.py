"""Report: tables, figures and pages from run folders. It needs no torch.

`tables` and `partition_plot` are the exceptions: they describe methods and federations.
"""
