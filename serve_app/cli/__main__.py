"""`python -m serve_app.cli`: the same as `caravan`, where that is not on the path."""

from serve_app.cli.main import main

main()
