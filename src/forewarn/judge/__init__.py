"""What the readings mean: rules judge them, a ledger follows each alert from its first sight to its end."""
