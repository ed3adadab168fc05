"""The probes, one per file: each sees the events of the training loop and returns readings per step."""
