"""Bridges to other libraries, one file each, on public names: a library is imported where it is used."""
