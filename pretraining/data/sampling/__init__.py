"""Which sample comes when: keyed orders, the mixture of datasets, token streams and packing. Arithmetic; no files."""
