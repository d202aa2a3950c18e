"""Ranks: processes and communicators, lockstep, waits, faults, and what a rank holds in a step."""
