"""Fixtures of tests that train."""

import logging

import pytest


@pytest.fixture
def no_orbax_log():
    """No log from orbax's threads, which outlives the test's streams."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
