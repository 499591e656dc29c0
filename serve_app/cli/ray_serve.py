"""Ray's command `serve`, whose processes import no modules of the working directory, which may be a
downloaded model repository."""

import os.path
from pathlib import Path

CODE = Path(__file__).parents[2]


def main() -> None:
    # Ray puts this folder first into the import path of its workers, and has no setting for it. The
    # processes stay in the working directory, because paths of models may be relative.
    os.path.curdir = str(CODE)
    from ray.serve.scripts import cli

    cli(prog_name="serve")


if __name__ == "__main__":
    main()
