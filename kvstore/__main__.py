"""`python -m kvstore`, for when the script is not on the path."""

from kvstore.cli import main

if __name__ == "__main__":
    main()
