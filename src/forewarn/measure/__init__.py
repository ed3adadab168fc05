"""Measuring a training loop: its events, the probes that turn them into readings, and the statistics engine."""
