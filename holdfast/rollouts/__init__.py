"""Rollouts: answers that the model generates, their records in the store, and the rows that a step learns from."""
