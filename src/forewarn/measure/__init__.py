"""What is read from a training loop: its events, the probes that turn them into readings, the statistics engine."""
