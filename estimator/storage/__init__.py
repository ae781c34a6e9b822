"""Files of the local file system, and of stores that are addressed by URLs."""
