"""Shards in columns: who holds what, who writes what, what is read from where. Pure functions."""
