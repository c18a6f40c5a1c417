"""The passes of remat: pure functions from graphs to plans, in the order of the files that a step goes through.

joint -> legality -> cost -> cut -> schedule -> memory -> search -> plan. Nothing here knows Dynamo, Inductor, the
environment or the disk; ``remat_compiler`` does.
"""
