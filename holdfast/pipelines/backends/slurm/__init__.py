"""Slurm behind the protocol of `holdfast.pipelines.backends.interface`: the DAG as a chain of batch jobs."""
