"""The Llama model: its layers, rotary positions, loss, initial weights, and what a token costs."""
