"""Checks: shapes, types, numbers, schedules and roundings, derived again from the programs' texts."""
