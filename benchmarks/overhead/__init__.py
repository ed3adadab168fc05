"""What forewarn and other tools add to a training step, and forewarn's aims; `make bench` writes docs/overhead.md."""
