"""Kubeflow Pipelines: what pods of the compiled pipeline look like, and everything that is asked of the KFP server.

Importing this package imports neither kfp nor Kubernetes; its modules do.
"""
