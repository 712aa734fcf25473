"""`turbojax generate`: text in, text out."""
