"""Everyday training faults, and what each monitoring tool says about them at its defaults."""
