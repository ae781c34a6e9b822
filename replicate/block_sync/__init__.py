"""Towers that train on their own within a block of steps and are averaged at its end."""
