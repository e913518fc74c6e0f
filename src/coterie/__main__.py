"""The command `coterie`, also as `python -m coterie`, and with it `torchrun -m coterie`."""

from __future__ import annotations


def main() -> None:
    """Load the command line and run it. Ctrl-C exits with code 130, also in the seconds in which torch is loaded."""
    try:
        from coterie.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
