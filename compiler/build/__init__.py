"""Builds: the folder of a compiled plan, its manifest, and every fact in it derived again."""
