"""`python -m forewarn`."""

from forewarn.cli import main

if __name__ == "__main__":
    main()
