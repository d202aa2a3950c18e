"""Launching: the processes of a run, their messages, and the handling of those that fail."""
