"""The command `holdfast`, by groups of commands. Importing it imports nothing heavy: a command does when it runs."""

from holdfast.pipelines.cli.entry import app, main

__all__ = ["app", "main"]
