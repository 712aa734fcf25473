"""What files of this folder share: a server without a model, its clients, and a tiny model."""

import dataclasses

import jax.numpy as jnp
import pytest

from tests.serving.engine_helpers import TINY, real_prompts
from turbojax import models


@pytest.fixture(scope="module")
def tokenizer():
    # Imported here as the server's packages are not everywhere where this folder's tests run.
    from tests.serving.server_helpers import tokenizer_with_chats

    return tokenizer_with_chats()


@pytest.fixture(scope="module")
def fake(tokenizer):
    from tests.serving.fake_engine import FakeEngine

    return FakeEngine(tokenizer=tokenizer)


@pytest.fixture(scope="module")
def served(fake, tokenizer):
    from tests.serving.server_helpers import running

    with running(fake, tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def client(served):
    with served.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(served):
    with served.http() as http:
        yield http


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    """One layer: quicker to compile."""
    return models.random_decoder(dataclasses.replace(TINY, num_layers=1), dtype=jnp.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return real_prompts()
