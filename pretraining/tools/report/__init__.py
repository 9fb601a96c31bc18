"""`pretrain report`: a page about runs, from what their folders hold."""
