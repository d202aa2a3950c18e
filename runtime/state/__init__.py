"""The state of a run: parameters, optimizer, checkpoints."""
