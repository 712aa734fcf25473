"""`turbojax doctor`: what can run on this machine, and in words why the rest cannot."""
