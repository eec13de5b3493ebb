"""The network protocol, its stages, CUDA graphs and precision tiers."""
