"""What watching a training loop costs: forewarn and others, side by side in one process, on the CPU."""
