"""Objectives: what a training step minimizes."""
