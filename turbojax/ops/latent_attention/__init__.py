"""Latent attention (MLA): decoding in absorbed form, and prompts in expanded form."""

from turbojax.ops.latent_attention.api import attend_latents as attend_latents
from turbojax.ops.latent_attention.api import (
    expanded_latent_attention as expanded_latent_attention,
)
from turbojax.ops.latent_attention.api import latent_attention as latent_attention
from turbojax.ops.latent_attention.api import paged_latent_attention as paged_latent_attention
from turbojax.ops.latent_attention.api import select as select
