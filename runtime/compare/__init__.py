"""Comparison: all ranks simulated in one process beside the captured graph and the plain module."""
