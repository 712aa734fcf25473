"""Training of the small model that ships with turbojax; not part of the installed package."""
