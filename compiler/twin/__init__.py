"""Twins: a large build's programs beside those of the same model, smaller."""
