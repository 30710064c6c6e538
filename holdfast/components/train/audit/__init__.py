"""Audit of a run: its steps are computed again and compared bit by bit with its record."""
