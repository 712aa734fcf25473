"""Fine-tuning: of all weights, at a long context too, and of adapters beside frozen weights.

Needs optax and orbax-checkpoint, which come with Flax; plots need matplotlib.
"""

from turbojax.finetune.comparison import compare as compare
from turbojax.finetune.comparison import read_log as read_log
from turbojax.finetune.comparison import save_plot as save_plot
from turbojax.finetune.comparison import summary as summary
from turbojax.finetune.comparison import unit as unit
from turbojax.finetune.data import Corpus as Corpus
from turbojax.finetune.data import TokenCorpus as TokenCorpus
from turbojax.finetune.data import corpus_of as corpus_of
from turbojax.finetune.data import standard_library_corpus as standard_library_corpus
from turbojax.finetune.data import tokens_of as tokens_of
from turbojax.finetune.frozen import sliced as sliced
from turbojax.finetune.lora import LoraTrainer as LoraTrainer
from turbojax.finetune.lora import token_losses as token_losses
from turbojax.finetune.run import ADAPTERS_NAME as ADAPTERS_NAME
from turbojax.finetune.run import MODEL_NAME as MODEL_NAME
from turbojax.finetune.run import Rhythm as Rhythm
from turbojax.finetune.run import fine_tune as fine_tune
from turbojax.finetune.run import fine_tune_adapters as fine_tune_adapters
from turbojax.finetune.run import last_checkpoint as last_checkpoint
from turbojax.finetune.settings import Settings as Settings
from turbojax.finetune.settings import for_context as for_context
from turbojax.finetune.trackers import TRACKERS as TRACKERS
from turbojax.finetune.trackers import check_trackers as check_trackers
from turbojax.finetune.trackers import reports as reports
from turbojax.finetune.trackers import tracker as tracker
from turbojax.finetune.trainer import Trainer as Trainer
from turbojax.finetune.trainer import dense_attention as dense_attention
