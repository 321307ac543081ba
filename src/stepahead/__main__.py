"""`python -m stepahead`: the same command as `stepahead`."""

from stepahead.cli.main import main

if __name__ == "__main__":
    main()
