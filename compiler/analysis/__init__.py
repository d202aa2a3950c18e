"""Analysis: what passes, checks and reports ask of programs: facts along lines, lifetimes, memory, messages."""
