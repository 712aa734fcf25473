"""The papers' tables in our form, on held-out text: one command for all of them.

`python -m benchmarks.evidence --out benchmarks/results/evidence_DATE.json`
"""
