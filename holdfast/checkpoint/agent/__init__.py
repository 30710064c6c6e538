"""Saving beside the training: a process of each node that makes copies in shared memory durable and commits them, so
that neither the interpreter nor the cores of a rank are spent on it more than a copy takes.
"""
