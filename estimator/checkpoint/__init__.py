"""What is saved, restored, and taken from another model."""
