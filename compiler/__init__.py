"""What a program is and what is known about it: meshes, placements, rules, capture, checks, build directory."""
