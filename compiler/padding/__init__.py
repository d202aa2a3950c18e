"""Padding: longer dims where sizes do not divide, and operators that must not see the added entries."""
