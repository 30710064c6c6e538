"""The benchmark of one accelerator: see `__main__`."""
