"""Placing: a type for every value, and collectives where two types meet."""
