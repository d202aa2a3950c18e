"""Layout: meshes, how a tensor lies on one, and the collectives that change it."""
