"""`python -m ridethrough` is `ridethrough`."""

import sys

from ridethrough.cli import main

if __name__ == "__main__":
    sys.exit(main())
