"""`python -m bench`; measured processes do not import it, so each loads one engine only."""

from bench.run import main

main()
