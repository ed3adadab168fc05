"""The fault benchmark: ordinary training scripts, faults to put into them, and how well each one is named."""
