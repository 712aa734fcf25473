"""`turbojax serve`: many texts, through an engine."""
