"""What `forewarn.preflight` checks: a few steps on a copy of the model and its optimizer before a long run."""
