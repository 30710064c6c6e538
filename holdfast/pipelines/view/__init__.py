"""What people see: the runs of a store, the page of one run, its summary, the terminal while it runs, MLflow's UI."""
