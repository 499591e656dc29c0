"""Ray's command `serve`, whose processes import no modules of the working directory, which may be a
downloaded model repository, and are ended in order when this one is stopped."""

import atexit
import os
import signal
from pathlib import Path

from serve_app.haproxy import CONFIG_VARIABLE
from serve_app.temporary_folders import hold

CODE = Path(__file__).parents[2]


def main() -> None:
    # Ray puts this folder first into the import path of its workers, and has no setting for it. The
    # processes stay in the working directory, because paths of models may be relative.
    os.path.curdir = str(CODE)
    # If `caravan serve` is killed, this process still ends the others in order, and Ray's processes
    # use the folder of HAProxy until then.
    if config := os.environ.get(CONFIG_VARIABLE):
        hold(Path(config).parent)
    from ray.serve.scripts import cli

    atexit.register(_end_undisturbed)  # called before the hook of Ray's import
    cli(prog_name="serve")


def _end_undisturbed() -> None:
    """Lets Ray's hook end all processes; if this one ended earlier, they would be killed with it,
    and Ray's agents would stay for a minute.

    A killed parent sends SIGTERM as often as it has threads (`end_with_parent`), each of which
    would interrupt the hook. Three seconds after the first, Ray's own handler sends SIGALRM.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(0)


if __name__ == "__main__":
    main()
