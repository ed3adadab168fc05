"""The fixtures of these tests."""

from tests.cli.conftest import forewarn
from tests.page_runs import client, made, page, root

__all__ = ["client", "forewarn", "made", "page", "root"]
