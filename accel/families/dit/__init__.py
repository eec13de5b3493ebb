"""DiT: Peebles & Xie, 2023, arXiv:2212.09748. network.py is models.py, under a name that no other folder can shadow."""
