"""Sizes that a plan declares as ranges: polynomials of them, and programs written in them."""
