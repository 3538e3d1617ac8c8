"""The command line: one module for each group of commands."""

from labkit.cli.root import app, main

__all__ = ["app", "main"]
