"""The config.json of the supported model families: reading it, and writing it for a model."""
