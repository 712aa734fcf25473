"""Fixtures of tests on several devices."""

from tests.training.conftest import no_orbax_log as no_orbax_log
