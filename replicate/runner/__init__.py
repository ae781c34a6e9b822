"""One training step on all towers: run, merge, apply."""
