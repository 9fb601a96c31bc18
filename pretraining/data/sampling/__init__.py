"""The order of samples: keyed orders, the mixture of datasets, token streams and packing. Arithmetic only, no files."""
