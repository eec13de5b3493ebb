"""Tensors in files, and what shapes, names and values of tensors say. Knows no family."""
