"""Tensor files, and checks of names, shapes and values. Independent of the families."""
