"""Sparse gradients: lookups in tables, and the rows that they change."""
