"""Adapters for training libraries, each thin over `forewarn.watch`."""
