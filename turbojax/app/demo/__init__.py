"""`turbojax demo`: a real model on a real file, through several KV caches side by side."""
