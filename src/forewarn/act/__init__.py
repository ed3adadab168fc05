"""What changes a training run: only these modules do, and only where the user asked for it."""
