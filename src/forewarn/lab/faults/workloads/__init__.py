"""The training scripts of the benchmark: one file per kind, each with a loop of its own."""
