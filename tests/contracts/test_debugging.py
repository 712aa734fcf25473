"""Every op under jax's switches for debugging, and all that draws with any kind of key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.contracts.op_cases import CASES, decoder
from turbojax import models
from turbojax.flax import linen
from turbojax.models.generation.sampling import Sampling, sample, sampling_rows

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize("name", CASES)
def test_no_nan_is_made_and_thrown_away(name):
    """Outside `jit`, where jax looks at what every operation gives."""
    call, arguments = CASES[name]()
    with jax.debug_nans(True):
        found = call(*arguments)
    for x in jax.tree.leaves(found):
        assert not np.any(np.isnan(np.asarray(x, np.float32)))


def test_nan_trips():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        tj.sas_softmax(jnp.full((1, 4), jnp.nan))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", CASES)
def test_infinite_results_alone_trip(name):
    """Under `jit`: the log-sum-exp of a query that sees nothing is -inf, and nothing else is."""
    call, arguments = CASES[name]()
    call = jax.jit(call)
    found = [np.asarray(x, np.float32) for x in jax.tree.leaves(call(*arguments))]
    infinite = [x for x in found if np.isinf(x).any()]
    for x in infinite:
        assert np.all(x[np.isinf(x)] == -np.inf)
    with jax.debug_infs(True):
        if infinite:
            with pytest.raises(FloatingPointError, match="inf"):
                call(*arguments)
        else:
            call(*arguments)


def abstract(call, arguments):
    """Shapes and dtypes of results, traced anew."""
    traced = jax.eval_shape(lambda *x: call(*x), *arguments)
    return jax.tree.map(lambda x: (x.shape, x.dtype), traced)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", CASES)
def test_no_tracer_leaks_and_64_bits_change_no_dtype(name):
    call, arguments = CASES[name]()
    wanted = abstract(call, arguments)
    with jax.checking_leaks():
        assert abstract(call, arguments) == wanted
    # With 64 bits, numbers of Python and jax's counters are wide: promotion must be the usual one.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert abstract(call, arguments) == wanted


@pytest.mark.slow
def test_64_bits_change_no_bits():
    call, arguments = CASES["kv4"]()
    wanted = jax.jit(lambda *x: call(*x))(*arguments)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = jax.jit(lambda *x: call(*x))(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


# Keys --------------------------------------------------------------------------------------------


@functools.cache
def drawn(implementation):
    """Tokens that are sampled, a rotation of codes, and weights; with some default of keys."""
    with jax.default_prng_impl(implementation):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
        rows = sampling_rows([Sampling(temperature=1.0, seed=i) for i in range(4)])
        return sample(logits, rows, "draw"), tj.polar.rotation(64, seed=3).signs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_samples_and_rotations_do_not_depend_on_the_kind_of_keys(implementation):
    """Random weights do, as jax's own numbers; nobody's text and no codes may."""
    for one, other in zip(*map(drawn, (implementation, IMPLEMENTATIONS[0])), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.quick(1, slow=1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_modules_take_keys_of_any_kind(implementation):
    """Typed and raw ones, of which a raw one has the default's kind."""
    module, x = linen.TurboAttention(32, 2), jnp.zeros((1, 4, 32))
    with jax.default_prng_impl(implementation):
        typed, raw = jax.random.key(1), jax.random.PRNGKey(1)
        assert raw.shape == jax.random.key_data(typed).shape
        init = jax.jit(module.init)
        for one, other in zip(*map(jax.tree.leaves, (init(typed, x), init(raw, x))), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_random_models_are_made_with_any_kind(implementation):
    with jax.default_prng_impl(implementation):
        made = models.random_decoder(decoder().config, seed=1)
        drawn = models.Transformer(decoder().config, rngs=nnx.Rngs(0))
    for x in jax.tree.leaves((made, nnx.to_pure_dict(nnx.state(drawn)))):
        assert np.all(np.isfinite(np.asarray(x, np.float32)))
