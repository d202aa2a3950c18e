"""Complex numbers as pairs of reals: the form of a captured graph, and the rule of each operator."""
