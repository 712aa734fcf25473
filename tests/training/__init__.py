"""Training, finetuning and LoRA, their interrupts and their resumption."""
