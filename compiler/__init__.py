"""Programs and the knowledge about them: meshes, placements, rules, capture, checks, build directory."""
