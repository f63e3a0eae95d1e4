"""`python -m kvferryd` is `kvferry`."""

import sys

from kvferryd.commands.cli import main

sys.exit(main())
