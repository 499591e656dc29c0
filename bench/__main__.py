"""`python -m bench`; measured processes do not import this, so each loads only its own engine."""

from bench.run import main

main()
