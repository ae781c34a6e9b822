"""The vocabulary of a model_fn: variables, randomness, records, the spec, train_ops, hooks, batches."""
