"""Several processes: starting them, agreeing on values, and noticing when one of them dies."""
