"""What tests of turbojax inside other people's packages share.

These packages promote dtypes and ranks, and warn, as they please: only here is that allowed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj

FLOAT = tj.TurboConfig(mode="float", softmax="exact")
"""Without quantization: differs from a package's own attention by rounding alone."""

ROUNDING = 2.0**-24
"""Half a unit in the last place of float32, over 1."""

CLOSE_TO_EXACT, CLOSE_TO_CODES = 3000 * ROUNDING, 4**0.5 / 10
"""Relative errors of logits. Codes of 4 bits are off by about a tenth of a vector. There are four
roundings, of keys and values of two layers, whose errors add up in squares."""


@contextlib.contextmanager
def as_they_please() -> Iterator[None]:
    """jax as users have it, without the strictness of our own tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def random_like(tree: Any, seed: int = 0, size: float = 0.3) -> Any:
    """Arrays of the shapes and dtypes of a tree, normally distributed."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return treedef.unflatten(
        [jnp.asarray(size * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    )


def relative_error(ours: Any, theirs: Any) -> float:
    """The largest relative error of an array of a tree, in the Euclidean norm."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(
        float(np.linalg.norm(np.asarray(x - y)) / max(np.linalg.norm(np.asarray(y)), 1e-30))
        for x, y in pairs
    )


def assert_trains_alike(theirs: Any, exact: Any, eight: Any = None) -> None:
    """Pairs of loss and gradients: to float32's digits without quantization, else to some steps."""
    loss, grads = theirs
    assert np.isfinite(loss)
    our_loss, our_grads = exact
    # Either way some hundred roundings in a row, which caps, norms and softmax make more by their
    # slopes, up to ten each.
    assert abs(our_loss - loss) < 100 * ROUNDING * abs(loss)
    assert relative_error(our_grads, grads) < 3000 * ROUNDING
    if eight is None:
        return
    # Numbers in 8 bits are off by up to 1/16; the loss, a mean, by less than one of them.
    our_loss, our_grads = eight
    assert 0 < abs(our_loss - loss) < abs(loss) / 16
    assert relative_error(our_grads, grads) < 1 / 3


class Letters:
    """A tokenizer of lower-case letters: 0 is padding, 1 begins, 2 ends."""

    vocab_size = 32  # Tunix' sampler takes the width of its models for this

    def encode(self, text: str, **_: Any) -> list[int]:
        """Tokens of letters."""
        return [ord(x) - ord("a") + 3 for x in text]

    def decode(self, tokens: Any, **_: Any) -> str:
        """The text of tokens, with marks for those that are no letters."""
        return "".join("_^$abcdefghijklmnopqrstuvwxyz123"[int(x)] for x in tokens)

    def bos_id(self) -> int:
        """The token that begins a text."""
        return 1

    def eos_id(self) -> int:
        """The token that ends one."""
        return 2

    def pad_id(self) -> int:
        """The token of padding."""
        return 0
