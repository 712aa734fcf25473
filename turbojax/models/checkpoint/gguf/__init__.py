"""GGUF files, as llama.cpp writes them: one file with metadata, a tokenizer and tensors.

They are read as if they were a folder in Hugging Face's layout: `header.py` parses the file,
`config.py` makes a `config.json` of its metadata, and `tensors.py` gives its tensors Hugging Face's
names, and reads their numbers when they are asked for.
"""
