"""The suite: remat under falling budgets beside everything that a user would pick instead, on the same work.

``python -m benchmarks.suite`` measures each model in a process of its own, keeps every point as soon as it is measured,
and goes on where it was stopped.
"""
