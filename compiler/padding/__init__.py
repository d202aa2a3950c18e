"""Padding: where sizes that do not divide are made longer, and what reads the rest."""
