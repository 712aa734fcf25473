"""The command, evaluation, documents, notebooks, files, and the project itself."""
