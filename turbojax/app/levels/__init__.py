"""`turbojax levels`: which levels policies choose for a real model on a real text."""
