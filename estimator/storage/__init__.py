"""Files of the local file system, of stores that are addressed by URLs, and of arrays by name."""
