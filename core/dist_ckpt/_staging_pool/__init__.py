"""Memory that a save is copied into, and the copying."""
