"""What a run takes, worked out before it begins: memory, operations, time. Arithmetic, no torch."""
