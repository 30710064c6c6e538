"""Adapters of training frameworks: their loops, with state that Holdfast saves and restores exactly."""
