"""How good the model is: scores on held-out documents, and a sample of its text."""
