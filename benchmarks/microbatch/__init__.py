"""Micro-batches measured: one step in N slices beside the whole step, a Python loop, and Inductor's own chunking."""
