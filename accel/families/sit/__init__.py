"""SiT: Ma et al., 2024, arXiv:2401.08740. DiT's network, trained as a flow."""
