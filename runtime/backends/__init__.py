"""Backends: one file for each way in which collectives happen."""
