"""A model_fn as pure steps: gradients, rematerialisation, `est.transform`."""
