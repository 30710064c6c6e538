"""A Kubernetes cluster in this process: a real HTTP API, the operator's behavior, and pods that are processes."""
