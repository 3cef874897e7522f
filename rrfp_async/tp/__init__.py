"""Agreement among the ranks that compute a stage together (tensor parallelism)."""
