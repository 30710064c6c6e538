"""Components: the steps of the pipeline, one folder each. A step runs in its own container or as a local process."""
