"""Measure which mask a model really uses."""
