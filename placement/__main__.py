"""``python -m placement``: the ``placement`` command."""

from placement.cli import app

if __name__ == "__main__":
    app(prog_name="placement")
