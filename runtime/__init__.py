"""Running a build: load, state, actions, data and metrics; imports neither the parser nor the passes."""
