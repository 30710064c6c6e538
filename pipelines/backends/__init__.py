"""Where a DAG can run: this machine, Kubeflow Pipelines, Argo Workflows. Importing this imports none of them."""
