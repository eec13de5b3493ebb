"""The network protocol, its stages, CUDA graphs, precision tiers and isolation."""
