"""How good the model is: loss on held-out documents, and a sample of its text."""
