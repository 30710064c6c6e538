"""Kubeflow Pipelines: the pods of the compiled pipeline, and all requests to the KFP server.

Importing this package imports neither kfp nor Kubernetes; its modules do.
"""
