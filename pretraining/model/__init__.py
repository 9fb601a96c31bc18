"""The Llama model: layers, rotary positions, loss, initial weights and Hugging Face configurations."""
