"""Where a decoder's parts are, how a mask reaches its layers, and what limits it."""
