"""The variants of `hf_helpers`, written and read once for all tests."""

import functools

import pytest

from tests.models import hf_helpers as hf
from turbojax import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A variant's folder, by its name."""
    return functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def decoder(folder):
    """A variant's decoder, by its name."""
    return functools.cache(lambda name: models.load_decoder(folder(name)))
