"""``python -m brevact doctor`` and ``python -m brevact plan MODEL``."""

import sys

from brevact.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
