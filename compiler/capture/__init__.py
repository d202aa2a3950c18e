"""Capture: a person's model and loss as one graph of functional operators."""
