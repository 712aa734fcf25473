"""GGUF files, as llama.cpp writes them: one file with metadata, a tokenizer and tensors.

They are read as if they were a folder in Hugging Face's layout: `header.py` parses, `config.py`
makes a `config.json` of the metadata, `tensors.py` gives tensors Hugging Face's names, and their
numbers when they are asked for.
"""
