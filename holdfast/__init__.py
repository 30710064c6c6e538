"""Holdfast: LLM training pipelines on Kubeflow and Argo that survive anything.

The one import name of the distribution. In the repository `components` and `pipelines` here are links to the top-level
folders of these names; in an installed package they are folders.
"""
