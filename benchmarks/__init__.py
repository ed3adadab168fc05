"""Measurements of what forewarn costs, alone and beside other tools; not installed with the package."""
