"""NVIDIA GPUs: candidates are built on all CPU cores, and run by one process a GPU, or only judged by their code."""
