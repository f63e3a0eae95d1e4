import sys

from kvferry.proxy import main

sys.exit(main())
