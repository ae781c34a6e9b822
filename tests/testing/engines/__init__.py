"""Engines that a test starts on this host."""
