"""One process of a gang: set-up, the training loop, and what watches it."""
