"""Slurm as a backend (`holdfast.pipelines.backends.interface`): the DAG as a chain of batch jobs."""
