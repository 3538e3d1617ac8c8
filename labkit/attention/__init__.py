"""Attention maps of a model, and measures of them."""
