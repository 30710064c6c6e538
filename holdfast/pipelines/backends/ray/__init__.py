"""Ray as a backend (`holdfast.pipelines.backends.interface`): the DAG as one job of the Ray Jobs API."""
