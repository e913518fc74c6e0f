"""`python -m coterie`, and with it `torchrun -m coterie`."""

from coterie.cli.main import main

if __name__ == "__main__":
    main()
