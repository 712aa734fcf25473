"""Checkpoints: Hugging Face folders, and those of quantized models."""

from turbojax import _moved

__getattr__ = _moved.renamed(
    __name__,
    {
        "BEGINNING_OF_FILE": "turbojax.models.checkpoint.huggingface.BEGINNING_OF_FILE",
        "WEIGHTS_NAME": "turbojax.models.checkpoint.huggingface.WEIGHTS_NAME",
        "embedded_path": "turbojax.models.checkpoint.huggingface.embedded_path",
        "held_out_modules": "turbojax.models.checkpoint.huggingface.held_out_modules",
        "load": "turbojax.models.checkpoint.huggingface.load",
        "load_transformer": "turbojax.models.checkpoint.huggingface.load_transformer",
        "load_llama": "turbojax.models.checkpoint.huggingface.load_transformer",
        "load_decoder": "turbojax.models.checkpoint.huggingface.load_decoder",
        "checkpoint_folder": "turbojax.models.checkpoint.huggingface.checkpoint_folder",
        "read_config": "turbojax.models.checkpoint.huggingface.read_config",
        "weight_files": "turbojax.models.checkpoint.huggingface.weight_files",
        "save": "turbojax.models.checkpoint.huggingface.save",
        "to_hf_tensors": "turbojax.models.checkpoint.huggingface.to_hf_tensors",
        "expected_shapes": "turbojax.models.checkpoint.huggingface.expected_shapes",
    },
)
