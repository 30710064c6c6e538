"""Launcher in an allocation of Slurm, and the environment of Slurm's commands."""
