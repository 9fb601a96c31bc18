"""`pretrain prepare`: text, or token ids of other tools, to token files and a tokenizer."""
