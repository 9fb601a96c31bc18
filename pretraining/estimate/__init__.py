"""Estimates of a run before it starts: memory, operations, time. Arithmetic, no torch."""
