"""What monitoring adds to a training step: forewarn beside the bare loop, in one process on one CPU thread."""
