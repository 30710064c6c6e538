"""The control plane of Holdfast: what runs where you submit from. Knows kfp, hera and Kubernetes; never torch."""
