"""The engine, its pages, its server and what they do when they are interrupted."""
