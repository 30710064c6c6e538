"""A Kubernetes cluster in this process: a real HTTP API, the operator's behaviour, and pods that are processes."""
