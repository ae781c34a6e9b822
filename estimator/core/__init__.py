"""What a model_fn may say and return: variables, randomness, records, the spec, train_ops, hooks, batches."""
