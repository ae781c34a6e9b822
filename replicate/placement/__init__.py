"""Where variables and optimizer slots live, as shardings."""
