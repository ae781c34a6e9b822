"""What the tests share: models, batches, comparisons, and processes to start."""
