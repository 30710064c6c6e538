"""Views for people: the runs of a store, one run's page and summary, the live terminal, MLflow's UI."""
