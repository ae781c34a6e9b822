"""Plugins of pytest: which tests a run has, and how much time they take."""
