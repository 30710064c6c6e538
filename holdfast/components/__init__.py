"""The steps of the pipeline: one folder each, which runs in a container of its own or as a local process."""
