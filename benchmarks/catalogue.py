"""Every suite, by name, and everything that the docs show of one result alone."""

from benchmarks import masks, model_training, real_caches, recorded
from benchmarks.evidence import catalogue as evidence
from benchmarks.suite import Shown
from benchmarks.suites import experts, families, flax, generate, latency, latent, loading
from benchmarks.suites.attention import suite as attention
from benchmarks.suites.fireq import suite as fireq
from benchmarks.suites.paged import suite as paged
from benchmarks.suites.parallel import suite as parallel
from benchmarks.suites.peers import suite as peers
from benchmarks.suites.pooled import suite as pooled
from benchmarks.suites.serving import suite as serving
from benchmarks.suites.verdict import suite as verdict

SUITES = {
    suite.name: suite
    for suite in (
        attention.ATTENTION,
        attention.HOPPER,
        attention.DEFAULT,
        pooled.SUITE,
        fireq.FIREQ,
        fireq.KV4,
        fireq.FIREQ_MODEL,
        experts.SUITE,
        paged.SUITE,
        paged.CHUNKS,
        paged.FORMATS,
        latent.SUITE,
        serving.SUITE,
        parallel.SUITE,
        flax.SUITE,
        families.SUITE,
        generate.SUITE,
        loading.SUITE,
        verdict.SUITE,
        latency.SUITE,
        peers.SUITE,
    )
}

SHOWN = (
    *(suite.shown for suite in SUITES.values()),
    serving.ENGINE,
    model_training.SHOWN,
    evidence.SHOWN,
    evidence.SMOLLM2,
    *real_caches.SHOWN,
    *recorded.SHOWN,
    masks.SHOWN,
    # Some rows of the suite, of a later day than its own result.
    Shown(("pooled_video",), {"pooled video": pooled.video_section}),
    # Two models on another device than the suite's own result.
    Shown(("families_h200",), {"families h200": families.families_summary}),
)
