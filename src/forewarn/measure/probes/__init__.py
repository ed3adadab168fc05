"""What is measured, one small probe per file; each sees the events of the training loop and gives readings per step."""
