"""What holds for every test: one thread per parallel region, since the machine may be shared."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
