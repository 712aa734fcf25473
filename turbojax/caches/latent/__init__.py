"""Latent attention (MLA): decoding in absorbed form, and prompts in expanded form."""

from turbojax.caches.latent.api import attend as attend
from turbojax.caches.latent.api import attend_pages as attend_pages
from turbojax.caches.latent.api import expanded_latent_attention as expanded_latent_attention
from turbojax.caches.latent.api import latent_attention as latent_attention
from turbojax.caches.latent.api import paged_latent_attention as paged_latent_attention
from turbojax.caches.latent.api import select as select
