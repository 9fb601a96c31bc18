"""Processes, device meshes and the one way in which a model is laid out over them."""
