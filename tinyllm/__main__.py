"""`python -m tinyllm` is the command `tinyllm`."""

from tinyllm.cli.app import main

if __name__ == "__main__":
    main()
