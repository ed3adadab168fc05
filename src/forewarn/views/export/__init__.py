"""A stored run as a file of another format. Runs of any size are read piece by piece."""
