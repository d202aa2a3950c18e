"""Programs: typed lines, their text, the actions of a step, and what a program costs."""
