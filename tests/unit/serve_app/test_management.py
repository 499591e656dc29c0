"""Progress of jobs that run once for each store, as one sequence of steps."""

from collections.abc import Iterator, Sequence

from model_zoo.sources.pull import PullProgress
from serve_app.on_demand import management as management_module
from serve_app.on_demand.commands import Account, Answer, Command, Follow
from serve_app.on_demand.management import Management

STEPS = tuple(map(PullProgress, ("pulling manifest", "pulling layer", "success")))


class Operations:
    """Stands for the processes: of each job, how many steps it has done at each poll."""

    def __init__(self, done: dict[str, Sequence[int]]) -> None:
        self._done: dict[str, Iterator[int]] = {name: iter(each) for name, each in done.items()}

    async def store_managers(self) -> list[str]:
        return [*self._done]

    async def order(self, replicas: list[str], command: Command) -> list[Answer]:
        if not isinstance(command, Follow):
            return [Answer(replica, replica) for replica in replicas]
        (replica,) = replicas
        count = next(self._done[replica])
        first = max(0, min(command.after, count) - 1)
        return [Answer(replica, Account(STEPS[first:count], first, count == len(STEPS)))]

    def forget(self) -> None:
        """Nothing is remembered."""


async def test_progress_begins_with_the_first_step_even_if_one_store_begins_late(monkeypatch):
    monkeypatch.setattr(management_module, "LOOK_S", 0.0)
    operations = Operations({"early": [2, 2, 3], "late": [0, 3, 3]})
    told = [step async for step in Management(operations, []).pull("x")]  # type: ignore[arg-type]
    assert told == [*STEPS]
