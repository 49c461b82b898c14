"""`python -m turnwise`, the same as `turnwise`."""

from turnwise.cli import main

if __name__ == "__main__":
    main()
