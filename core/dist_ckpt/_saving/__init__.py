"""The way of a save: describe, plan, write, publish."""
