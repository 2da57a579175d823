"""``python -m brevact doctor``, ``python -m brevact report MODEL`` and ``python -m brevact run SCRIPT``."""

import sys

from brevact.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
