"""From a plan to programs: reading, capture, passes, one after the other."""
