"""The `turbojax` command: one file or folder per subcommand, with what it does."""
