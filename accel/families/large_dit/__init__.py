"""Large-DiT: Alpha-VLLM, 2024. A DiT of LLaMA's blocks."""
