"""`turbojax eval`: what caches cost on real text, on long contexts and on tasks."""
