"""Which lanes of an emulated warp run."""

import threading

import numpy as np


class Active(threading.local):
    """The lanes that run, and within `when` those of them for which it holds; of each thread."""

    def __init__(self):
        self.masks = [np.ones(32, bool)]

    def __getitem__(self, i):
        return self.masks[i]

    def append(self, mask):
        self.masks.append(mask)

    def pop(self):
        return self.masks.pop()
