"""Measures the machines before a run: `pretrain doctor`."""
