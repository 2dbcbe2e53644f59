"""The way of a load: open, match, read, merge."""
