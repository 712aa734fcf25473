"""A few sizes for prompts and caches: each new size costs two compilations of the whole model.

XLA compiles a program for every shape. `generate` therefore pads prompts on the right and makes
caches a little longer, to sizes that calls with other lengths share.
"""

_SHORTEST = 32
_STEP = 64


def bucket(length: int) -> int:
    """The smallest of a few sizes that holds so many tokens.

    32, the multiples of 64 up to 512, and from there on four sizes to each doubling: 640, 768, 896,
    1024, 1280, ... That is less than 64 tokens or a quarter more than asked for.

    Args:
      length: at least 1.
    """
    length = int(length)  # numpy's integers have no bit_length
    if length <= _SHORTEST:
        return _SHORTEST
    step = max(_STEP, 2 ** ((length - 1).bit_length() - 3))
    return -(-length // step) * step


def prompt_bucket(longest: int, limit: int) -> int:
    """The size that prompts are padded to.

    Args:
      longest: tokens of the longest prompt, at most `limit`.
      limit: the most that a model takes, which is a size, too.
    """
    return min(bucket(longest), limit)


def cache_bucket(longest: int, max_new_tokens: int, limit: int) -> int:
    """The tokens that caches are made for: the sum of a size for the prompts and one for the rest.

    So calls whose prompts share a size, and whose `max_new_tokens` do, share both programs, that of
    the prompts and that of a step; a size of the sum alone would cut the prompts' sizes in two.

    Args:
      longest: tokens of the longest prompt.
      max_new_tokens: to be added; with `longest` at most `limit`.
      limit: the most that a model takes, which is a size, too.
    """
    return min(bucket(longest) + bucket(max_new_tokens), limit)
