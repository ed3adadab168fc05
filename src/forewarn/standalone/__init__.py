"""Monitors and functions that work by themselves, without `forewarn.watch` and without a run directory."""
