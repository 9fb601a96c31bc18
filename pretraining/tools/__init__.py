"""Commands besides training; the code of training does not import them."""
