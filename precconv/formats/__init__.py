"""File formats: a file in, a file out."""
