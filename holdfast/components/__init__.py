"""The data plane of Holdfast: what runs inside containers.

A folder with a `__main__.py` is a step of the pipeline; a folder without one is a part that steps are built from.
"""
