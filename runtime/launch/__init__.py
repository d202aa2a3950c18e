"""Launching: the processes of a run, what they say, and what becomes of those that fail."""
