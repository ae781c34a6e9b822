"""Placements of variables and optimizer slots, as shardings."""
