"""From programs to a verified build: proofs, the comparison of numbers, the twin, limits."""
