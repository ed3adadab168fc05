"""The command line, called as a person calls it."""

from tests.cli.conftest import forewarn

__all__ = ["forewarn"]  # a fixture
