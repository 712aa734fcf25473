"""Masks of allowed tokens, and constraints by a function."""

import jax.numpy as jnp
import numpy as np
import pytest

from turbojax.models import AllowedTokens, Constraint
from turbojax.models.generation.constraints import is_over, pack


def tokens_of(mask: np.ndarray) -> list[int]:
    """Tokens whose bits are set, by the definition."""
    return [t for t in range(32 * mask.size) if int(mask[t // 32]) >> (t % 32) & 1]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 97, 1000])
def test_pack_sets_the_bit_of_every_allowed_token_and_no_other(size):
    allowed = np.random.default_rng(size).random(size) < 0.5
    allowed[-1] = True
    mask = pack(allowed)
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-size // 32),)
    assert tokens_of(mask) == np.flatnonzero(allowed).tolist()


@pytest.mark.parametrize("size", [1, 32, 45])
def test_pack_of_none_and_of_all(size):
    assert tokens_of(pack(np.zeros(size, bool))) == []
    assert tokens_of(pack(np.ones(size, bool))) == list(range(size))


def test_pack_reads_arrays_that_are_not_contiguous():
    allowed = np.random.default_rng(0).random(80) < 0.5
    assert tokens_of(pack(allowed[::2])) == np.flatnonzero(allowed[::2]).tolist()


@pytest.mark.parametrize(
    ("allowed", "error", "message"),
    [
        (np.zeros(4, np.uint8), TypeError, "allowed is of uint8, must be an array of bool"),
        ([True, False], TypeError, "allowed is of list, must be an array of bool"),
        (np.zeros((2, 4), bool), ValueError, r"allowed.shape=\(2, 4\) must be \[V\]"),
    ],
)
def test_pack_refuses(allowed, error, message):
    with pytest.raises(error, match=message):
        pack(allowed)


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        (None, list(range(40))),
        (np.arange(40) % 3 == 0, list(range(0, 40, 3))),
        (jnp.arange(40) < 2, [0, 1]),
        ([i == 39 for i in range(40)], [39]),
        ([], []),
        (set(), []),
        (np.zeros(0, np.int64), []),
        ([5, 5, 0], [0, 5]),
        ({1, 33}, [1, 33]),
        (range(4), [0, 1, 2, 3]),
        ((x for x in (2, np.int8(3))), [2, 3]),
        (np.array([39, 0], np.uint64), [0, 39]),
        (jnp.asarray([7]), [7]),
    ],
)
def test_a_callback_says_what_is_allowed(returned, wanted):
    assert tokens_of(AllowedTokens(lambda _: returned, 40).begin().allowed()) == wanted


def test_a_callback_gets_the_tokens_of_its_own_text():
    seen = []

    def after(tokens):
        seen.append(tokens)
        return [len(tokens)]

    constraint = AllowedTokens(after, 8)
    assert isinstance(constraint, Constraint)
    first, second = constraint.begin(), constraint.begin()
    assert tokens_of(first.allowed()) == [0]
    first.accept(np.int32(5))
    first.accept(6)
    assert tokens_of(first.allowed()) == [2]
    assert tokens_of(second.allowed()) == [0]
    assert seen == [(), (5, 6), ()]
    assert type(seen[1][0]) is int


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (np.ones(39, bool), ValueError, r"bools of shape \(39,\) from a callback must be \(40,\)"),
        ([True, False], ValueError, r"bools of shape \(2,\) from a callback must be \(40,\)"),
        (np.ones((1, 40), bool), ValueError, r"bools of shape \(1, 40\)"),
        ([40], ValueError, "token 40 from a callback must be within 0..39"),
        ([3, -1], ValueError, "token -1 from a callback must be within 0..39"),
        ([10**30], ValueError, "token 1000000000000000000000000000000 from a callback"),
        (np.array([2**40]), ValueError, "token 1099511627776 from a callback"),
        ([True, 3], TypeError, "a token from a callback=True must be an integer"),
        ([1.0], TypeError, "a token from a callback=1.0 must be an integer"),
        ("ab", TypeError, "a token from a callback='a' must be an integer"),
        (np.ones(40), TypeError, r"float64 of shape \(40,\) from a callback must be bools \[V\]"),
        (np.ones((2, 2), int), TypeError, r"int64 of shape \(2, 2\) from a callback"),
        (5, TypeError, "5 from a callback must be bools, tokens or None"),
    ],
)
def test_what_a_callback_must_not_return(returned, error, message):
    state = AllowedTokens(lambda _: returned, 40).begin()
    with pytest.raises(error, match=message):
        state.allowed()


@pytest.mark.parametrize(
    ("callback", "size", "error", "message"),
    [
        ([1], 4, TypeError, r"callback=\[1\] must be a function"),
        (len, 0, ValueError, "vocab_size=0 must be at least 1"),
        (len, 4.0, TypeError, "vocab_size=4.0 must be an integer"),
    ],
)
def test_a_constraint_refuses(callback, size, error, message):
    with pytest.raises(error, match=message):
        AllowedTokens(callback, size)


@pytest.mark.parametrize("complete", [True, False, None])
@pytest.mark.parametrize("words", [[0, 0], [0, 4], []])
def test_a_text_is_over_where_it_is_complete_and_nothing_may_follow(complete, words):
    class State:
        def allowed(self):
            return np.array(words, np.uint32)

        def accept(self, token):
            raise AssertionError

    if complete is not None:
        State.is_complete = complete
    assert is_over(State()) == (complete is True and not any(words))
    assert not is_over(None)
