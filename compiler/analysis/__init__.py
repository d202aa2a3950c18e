"""Analysis: what passes, checks and reports ask of programs: facts that travel along lines, lifetimes, memory, messages."""
