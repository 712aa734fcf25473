"""Tests in here need other people's packages, which `make test-integrations` installs.

Nobody else collects them: TURBOJAX_INTEGRATIONS=1 says that the packages are there, and then one
that is missing is an error.
"""

import os
from collections.abc import Iterator

import pytest

from tests.integrations.helpers import as_they_please

if os.environ.get("TURBOJAX_INTEGRATIONS") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These packages warn as they please."""
    for item in items:
        if item.get_closest_marker("integrations"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def _permissive() -> Iterator[None]:
    with as_they_please():
        yield
