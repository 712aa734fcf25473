"""Folders of every family: read as transformers writes them, written as transformers reads them."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from turbojax import models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def theirs():
    """What transformers makes of a folder: imported here, because it may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


def same_bits(one, other) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and (
        np.asarray(one).tobytes() == np.asarray(other).tobytes()
    )


def holds(folder, tensors) -> bool:
    """Whether a model's arrays are these, whatever the files they came from."""
    leaves = [jax.tree.leaves(nnx.state(models.load(x))) for x in (folder, tensors)]
    return all(map(same_bits, *leaves)) and len(leaves[0]) == len(leaves[1])


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", list(hf.VARIANTS)[::3])
def test_what_transformers_writes_is_what_the_tests_write(theirs, tmp_path, name):
    """In one file and in several."""
    hf.write(name, tmp_path / "tests")
    for folder, options in (("one", {}), ("many", {"max_shard_size": "60KB"})):
        theirs.reference(name).save_pretrained(tmp_path / folder, **options)
        assert models.load(tmp_path / folder).config == models.load(tmp_path / "tests").config
        assert holds(tmp_path / folder, tmp_path / "tests")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_transformers_reads_what_the_tests_write(theirs, tmp_path, name):
    expected = theirs.reference(name).state_dict()
    for limit in (None, 60_000):
        folder = hf.write(name, tmp_path / str(limit), shard_bytes=limit)
        found = theirs.whole_state(folder)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[key].numpy(), x.numpy()) for key, x in expected.items())


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_transformers_reads_what_is_saved(theirs, tmp_path, name):
    model = models.load(hf.write(name, tmp_path / "in"))
    expected = theirs.reference(name).state_dict()
    for limit in (1 << 30, 60_000):
        out = tmp_path / str(limit)
        models.save(model, out, max_shard_bytes=limit)
        found = theirs.whole_state(out)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[key].numpy(), x.numpy()) for key, x in expected.items())
