"""The command `holdfast`, in groups of commands. Importing it is quick: heavy imports happen when a command runs."""

from holdfast.pipelines.cli.entry import app, main

__all__ = ["app", "main"]
