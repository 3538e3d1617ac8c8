"""Readers and validators of data sets. The embedded data lie in the folder `data`, each with a card."""
