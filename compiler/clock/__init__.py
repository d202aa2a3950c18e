"""The clock: clusters as descriptions, and the time that lines, messages and the actions of a step take on them."""
