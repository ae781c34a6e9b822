"""Checkpoints: saved, restored, listed, and read from other models."""
