"""What several devices of one host are worth: the same call on one and on all of them."""
