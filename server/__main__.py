"""`python -m headrace.server` is `headrace`."""

import sys

from headrace.server.entry import main

if __name__ == "__main__":
    sys.exit(main())
