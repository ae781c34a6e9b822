"""Names that users of TensorFlow look for, and what to write instead."""
