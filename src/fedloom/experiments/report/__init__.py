"""Report: tables, figures and pages from run folders. It needs no torch."""
