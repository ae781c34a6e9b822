"""Towers: their devices, the map over them, collectives, and the split of a batch."""
