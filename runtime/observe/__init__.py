"""Observation: the figures of steps, the places that they are written to, and profiles."""
