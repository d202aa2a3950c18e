"""Twins: a large build's programs compared with those of a smaller model from the same code."""
