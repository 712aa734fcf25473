"""The suite of peers: other people's kernels beside ours, in one run on one device."""
