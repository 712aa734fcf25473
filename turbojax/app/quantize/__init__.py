"""`turbojax quantize`: a checkpoint with INT4 weights from one without."""
