"""Token data: from files on disk to the batch of any step, each sample a pure function of its index."""
