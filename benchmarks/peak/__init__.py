"""Peaks: the budget held against the allocator's count, over many models and beside every rival.

``python -m benchmarks.peak`` measures each model in a process of its own and prints what became of the promises.
"""
