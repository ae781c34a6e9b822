"""What the process of a run must survive: signals, forks, missing standard streams."""
