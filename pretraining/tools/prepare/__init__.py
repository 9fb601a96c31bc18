"""`pretrain prepare`: conversion of text, or of token ids, into token files and a tokenizer."""
