"""The rewrites from a captured graph to per-role programs, one pure function a file."""
