"""Copies of the state near the ranks: in the memory of this node and of another one, and on a disk. They are saved more
often than a checkpoint, need no root, and are what a gang goes on from where they are newer than the newest checkpoint.
"""
