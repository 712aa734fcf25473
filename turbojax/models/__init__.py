"""A Llama-family decoder in Flax nnx, its checkpoints, and the model shipped with turbojax."""

from turbojax.models.checkpoint import BEGINNING_OF_FILE as BEGINNING_OF_FILE
from turbojax.models.checkpoint import embedded_path as embedded_path
from turbojax.models.checkpoint import held_out_modules as held_out_modules
from turbojax.models.checkpoint import load as load
from turbojax.models.checkpoint import save as save
from turbojax.models.config import LlamaConfig as LlamaConfig
from turbojax.models.llama import Attend as Attend
from turbojax.models.llama import Llama as Llama
from turbojax.models.llama import causal_attention as causal_attention
