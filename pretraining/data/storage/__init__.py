"""What is on disk: token files, the index of their documents, and reading them. The seam for another token format."""
