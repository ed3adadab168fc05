"""The fixtures of these tests."""

from tests.cli.conftest import forewarn
from tests.page_runs import built, client, made, root

__all__ = ["built", "client", "forewarn", "made", "root"]
