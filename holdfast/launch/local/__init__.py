"""Launcher on this machine."""
