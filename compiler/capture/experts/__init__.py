"""Layers of experts: their forms, lists and loops, as one routed call each."""
