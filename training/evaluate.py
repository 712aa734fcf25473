"""Bits per byte on files a model has not seen: `turbojax.finetune` has it, fine-tuning needs it."""

from turbojax.finetune.evaluate import bits_per_byte as bits_per_byte
from turbojax.finetune.evaluate import windows as windows
