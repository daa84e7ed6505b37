"""``python -m qerl``: the same as the ``qerl`` command."""

from qerl.cli import main

if __name__ == "__main__":
    main()
