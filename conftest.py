"""What every test and doctest runs under: several CPU devices and strict dtype promotion."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
