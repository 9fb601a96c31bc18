"""Token files on disk: their formats, the index of their documents, and reading."""
