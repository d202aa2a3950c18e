"""Proposals: a plan drafted for a model that has none, from its code and its captured graph."""
