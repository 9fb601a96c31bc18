"""Evaluation of the model: scores on evaluation sets (`held_out`), and generated text (`generation`)."""
