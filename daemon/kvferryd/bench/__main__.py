import sys

from kvferryd.bench import main

sys.exit(main())
