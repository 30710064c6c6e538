"""Control plane of Holdfast, on the machine that submits. Uses kfp, hera and Kubernetes, never torch."""
