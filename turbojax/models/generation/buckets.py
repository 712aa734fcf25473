"""A few sizes for prompts and caches: each new size costs two compilations of the whole model.

XLA compiles a program for every shape. `generate` therefore pads prompts on the right, and makes
caches a little longer, to sizes that calls with other lengths share.
"""

_SHORTEST = 32
_STEP = 64


def bucket(length: int) -> int:
    """The smallest of a few sizes that holds so many tokens, at least 1.

    The sizes are 32, the multiples of 64 up to 512, and from there on four to each doubling: 640,
    768, 896, 1024, 1280, ... A size is less than 64 tokens or a quarter more than asked for.
    """
    length = int(length)  # numpy's integers have no bit_length
    if length <= _SHORTEST:
        return _SHORTEST
    step = max(_STEP, 2 ** ((length - 1).bit_length() - 3))
    return -(-length // step) * step


def prompt_bucket(longest: int, limit: int) -> int:
    """The size that prompts are padded to, at most the model's `limit`, which is a size too."""
    return min(bucket(longest), limit)


def cache_bucket(longest: int, max_new_tokens: int, limit: int) -> int:
    """The tokens that caches are made for: a size for the prompts plus one for the new tokens.

    So calls whose prompts share a size, and whose `max_new_tokens` do, share both programs: that of
    the prompts and that of a step. A size of the sum alone would divide the prompts' sizes into
    two.
    """
    return min(bucket(longest) + bucket(max_new_tokens), limit)
