"""This machine: the steps of the DAG as processes."""
