"""This machine: the compiled KFP pipeline in `kfp.local`."""
