"""What processes do that work together, as `helpers_cluster` starts them."""

import time

import jax
from absl import logging

import replicate


def meet():
    """The good case, with different ends."""
    logging.set_verbosity(logging.INFO)
    replicate.initialize_distributed(timeout_secs=30)
    print("process", jax.process_index(), "of", jax.process_count(), "devices", jax.device_count(), flush=True)
    time.sleep(0.5 * jax.process_index())
    print("end", flush=True)
