"""Commands beside training: nothing that trains imports them."""
