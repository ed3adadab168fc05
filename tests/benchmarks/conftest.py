"""The small workload of the tests of `forewarn bench`."""

import pytest

from forewarn.lab.bench.workloads import Workload
from tests.lab.bench.conftest import parts


@pytest.fixture
def small_workload() -> Workload:
    return Workload("small", "two layers", parts)
