"""Families of networks, a folder each."""
