"""Checkpoints: what is saved (`state`), how (`store`), and when (`manager`)."""
