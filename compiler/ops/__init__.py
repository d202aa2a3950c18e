"""Operators: a row of facts for each, its sharding rule, parc's own operators, and the shapes of results."""
