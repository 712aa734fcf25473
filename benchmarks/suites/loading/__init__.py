"""Loading a checkpoint of a real size."""
