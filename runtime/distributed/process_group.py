"""Ranks that are processes, joined by `torch.distributed`: NCCL between GPUs, Gloo between CPUs."""

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.distributed.control_channel import ControlChannel, RankZero
from runtime.errors import EngineDeadError

# The longest that ranks wait for each other within a step.
STEP_TIMEOUT = timedelta(seconds=120)
_JOIN_TIMEOUT = timedelta(seconds=60)
_SIOCGIFADDR = 0x8915


class ProcessRanks:
    """One of several processes, each with one device of the same kind. A process has one group.

    On a CPU, sums are added in the order of ranks, so a row's bits do not depend on other rows.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, server: dist.TCPStore | None = None
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._server = server  # lives as long as the group

    @classmethod
    def leading(cls, rank_zero: RankZero, device: torch.device) -> "ProcessRanks":
        """The group of rank 0; all ranks have joined it.

        Raises the failure of another rank as soon as it is reported: `torch.distributed` waits for
        a lost rank for minutes (Gloo) or forever (NCCL), so it joins on a thread of its own. The
        server of the store ends then, and with it the waiting of all ranks that its clients are.
        """
        _use_interface_of(rank_zero.address)
        server = dist.TCPStore(
            rank_zero.address, 0, is_master=True, wait_for_workers=False, timeout=_JOIN_TIMEOUT
        )
        port = server.port
        rank_zero.send_json({"store": port})

        def join() -> None:
            try:
                _join(_store(rank_zero.address, port), 0, rank_zero.size, device)
            except Exception as error:
                cause = rank_zero.cause_of(error)  # a failure that is known already remains
                rank_zero.fail(EngineDeadError(f"Rank 0 cannot join the others: {cause}"))

        joining = threading.Thread(target=join, name="joining-ranks", daemon=True)
        joining.start()
        try:
            rank_zero.receive_json()  # that they have joined
        except BaseException:
            del server  # which the exception would keep
            raise
        joining.join()
        if not dist.is_initialized():
            rank_zero.check()
        return cls(0, rank_zero.size, device, server)

    @classmethod
    def following(cls, control_channel: ControlChannel, device: torch.device) -> "ProcessRanks":
        rank_info = control_channel.rank_info
        _use_interface_of(control_channel.address)
        port = int(control_channel.receive_json()["store"])
        store = _store(rank_info.host, port)
        _join(store, rank_info.rank, rank_info.size, device)
        control_channel.send_json({"joined": True})
        return cls(rank_info.rank, rank_info.size, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added in float32."""
        wide = x.float().contiguous()
        if not wide.numel():
            return x
        if wide.is_cuda:
            dist.all_reduce(wide)
            return wide.to(x.dtype)
        total, *others = self.of_all(wide)
        for other in others:
            total += other
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], sum(widths))
        widest = max(widths)
        rows = x.flatten(0, -2)
        own = rows.new_zeros(len(rows), widest)
        own[:, : widths[self.rank]] = rows
        parts = zip(self.of_all(own), widths, strict=True)
        held = [part[:, :width] for part, width in parts]
        return torch.cat(held, dim=1).unflatten(0, x.shape[:-1])

    def broadcast(self, x: Tensor) -> Tensor:
        """Copies x of rank 0 into x of all other ranks, and returns it."""
        if x.numel():
            dist.broadcast(x, 0)
        return x

    def lowest(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The elementwise minimum over all ranks. Synchronises the device."""
        return self._agreed(numbers, dist.ReduceOp.MIN)

    def totals(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The elementwise sum over all ranks. Synchronises the device."""
        return self._agreed(numbers, dist.ReduceOp.SUM)

    def abort(self) -> None:
        """Fail pending collectives now; Gloo does so without help."""
        if self._device.type == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def close(self) -> None:
        if dist.is_initialized():
            with suppress(RuntimeError):  # other ranks may have ended
                dist.destroy_process_group()

    def of_all(self, x: Tensor) -> tuple[Tensor, ...]:
        """x of each rank; contiguous and of the same shape on all."""
        parts = x.new_empty(self.size * x.numel())
        dist.all_gather_single(parts, x.flatten())
        return parts.view(self.size, *x.shape).unbind()

    def _agreed(
        self, numbers: Sequence[int], operation: dist.ReduceOp.RedOpType
    ) -> tuple[int, ...]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, operation)
        return tuple(tensor.tolist())


def _store(host: str, port: int) -> dist.TCPStore:
    """A client of rank 0's store."""
    return dist.TCPStore(host, port, is_master=False, timeout=_JOIN_TIMEOUT)


def _join(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=STEP_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


def _use_interface_of(address: str) -> None:
    """Use the network interface of the control channel, unless the environment selects one."""
    name = _interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address, if any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
