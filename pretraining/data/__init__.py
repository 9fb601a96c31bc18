"""Token data, from files on disk to the batch of any step. Each sample is a pure function of its index."""
