"""Entry point of ``python -m gradsan``."""

import sys

from gradsan.cli import main

if __name__ == "__main__":
    sys.exit(main())
