"""Explanations: what a line, a message or a module of a build costs and why, and what differs between two builds."""
