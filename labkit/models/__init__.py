"""Load a model by registered name, hub id or folder; heads for tasks; saving."""

from labkit.models.loading import Loaded, available, load

__all__ = ["Loaded", "available", "load"]
