"""Text through a model: prompts, steps, choosing tokens, and sessions."""

from turbojax import _moved

__getattr__ = _moved.renamed(
    __name__,
    {
        "Session": "turbojax.models.generation.session.Session",
        "start": "turbojax.models.generation.session.start",
        "start_in_bucket": "turbojax.models.generation.session.start_in_bucket",
        "score": "turbojax.models.generation.session.score",
        "stream": "turbojax.models.generation.session.stream",
        "generate": "turbojax.models.generation.session.generate",
    },
)
