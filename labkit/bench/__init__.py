"""Measurements that a user can repeat: what a training costs on this machine (`labkit bench cost`)."""
