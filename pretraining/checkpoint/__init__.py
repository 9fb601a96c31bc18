"""Checkpoints: where a run starts from (`start_point`), when it saves (`manager`), and how (`saver`, `writer`)."""
