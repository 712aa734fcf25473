"""`turbojax calibrate`: the command, what it does and what it shows."""
