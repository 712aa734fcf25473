"""Decode steps of whole models of several families."""
