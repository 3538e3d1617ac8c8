"""`python -m labkit` is the `labkit` command (accelerate and torchrun start it this way)."""

from labkit.cli import main

if __name__ == "__main__":
    main()
