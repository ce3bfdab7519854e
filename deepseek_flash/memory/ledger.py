"""Who may hold how many bytes of one device: the budget that every large allocation goes through.

The ledger counts; it allocates nothing. A holder reserves before it allocates and resizes before it grows, so the
sum of what is held never passes the limit. Elastic holders (cache pools) can be asked to give bytes back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from deepseek_flash.errors import ConfigError, InternalError, MemoryBudgetError
from deepseek_flash.memory.probe import HostMemory, host_memory
from deepseek_flash.memory.report import human

Kind = Literal["fixed", "elastic", "workspace"]
Shrink = Callable[[int], None]
"""Called with the most bytes that the holder should keep; it frees, then calls ``Reservation.resize`` itself.
On the thread of whoever needs the room, without any lock of the ledger; it may give back less than asked."""

DEFAULT_FRACTION = {"cuda": 0.8, "cpu": 0.5}
_ROUNDS = 3
"""How often elastic holders are asked before a reservation is refused."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Reservation:
    """Bytes that belong to one holder until ``release``. Made by :meth:`MemoryBudget.reserve`."""

    name: str
    owner: str
    kind: Kind
    bytes: int
    floor: int
    """Bytes below which an elastic holder cannot be asked to go."""
    budget: MemoryBudget
    shrink: Shrink | None = None
    released: bool = False

    def resize(self, nbytes: int) -> None:
        """Hold so many bytes from now on. Growing may raise MemoryBudgetError, and then nothing has changed."""
        self.budget._change(self, nbytes)

    def release(self) -> None:
        """Hold nothing any more. Idempotent."""
        self.budget._forget(self)


@dataclass(frozen=True, slots=True)
class Holding:
    """One line of the ledger. Bytes."""

    name: str
    owner: str
    kind: Kind
    bytes: int
    counted: int
    """What it takes of the limit: workspaces take turns, so only the largest of them counts."""


@dataclass(slots=True)
class _Want:
    """Who is asked to keep how much."""

    reservation: Reservation
    keep: int


class MemoryBudget:
    """The ledger of one device. Thread-safe; callbacks run without its lock.

    ``limit``: bytes that all holders may have together; ``total``: what the device has [limit].
    """

    def __init__(self, device: str, limit: int, *, total: int | None = None) -> None:
        if limit < 1:
            raise ConfigError(f"a memory budget of {limit} bytes holds nothing", field="memory_budget", value=limit)
        self.device, self.total = device, total or limit
        self._limit = limit
        self._held: list[Reservation] = []
        self._lock = threading.Lock()
        self.peak = 0
        """Most bytes that were ever counted at once."""

    @classmethod
    def of(
        cls, device: str, *, fraction: float | None = None, limit: int | None = None, host: HostMemory | None = None
    ) -> MemoryBudget:
        """A budget of a share of the device's memory, or of so many bytes. On CPU the device's memory is the RAM, or
        the cgroup's limit when that is smaller."""
        if fraction is not None and limit is not None:
            raise ConfigError(
                f"memory_fraction={fraction} and memory_budget={limit}: give one of them",
                field="memory_budget",
                value=limit,
            )
        if device != "cpu":
            raise InternalError(f"there is no memory probe for device {device!r}")
        host = host or host_memory()
        share = DEFAULT_FRACTION["cpu"] if fraction is None else fraction
        return cls(
            device,
            int(host.total * share) if limit is None else limit,
            total=host.total,
        )

    # ---- looking

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def held(self) -> int:
        """Bytes counted now."""
        with self._lock:
            return _counted(self._held)

    @property
    def available(self) -> int:
        """Bytes that can be reserved now without asking anybody to shrink; negative while over a lowered limit."""
        return self._limit - self.held

    def could_give(self, part: float = 1.0) -> int:
        """Bytes that a newcomer could reserve, were elastic holders to give ``part`` of what is above their floor."""
        with self._lock:
            spare = sum(max(0, r.bytes - r.floor) for r in self._held if r.kind == "elastic")
            return max(0, self._limit - _counted(self._held) + int(spare * part))

    def holdings(self) -> list[Holding]:
        """Every line, in order of reservation."""
        with self._lock:
            held = list(self._held)
        largest = max((r for r in held if r.kind == "workspace"), key=lambda r: r.bytes, default=None)
        return [
            Holding(r.name, r.owner, r.kind, r.bytes, r.bytes if r.kind != "workspace" or r is largest else 0)
            for r in held
        ]

    def table(self) -> str:
        """Who holds what, for people."""
        lines = self.holdings()
        rows = [(h.owner, h.name, human(h.bytes), "" if h.counted else "takes turns") for h in lines]
        rows.append(("", "held", human(self.held), f"of {human(self._limit)} on {self.device}"))
        widths = [max(len(r[i]) for r in rows) for i in range(3)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)

    # ---- holding

    def reserve(
        self,
        name: str,
        nbytes: int,
        *,
        kind: Kind = "fixed",
        owner: str = "",
        floor: int = 0,
        shrink: Shrink | None = None,
    ) -> Reservation:
        """Bytes for a holder, if need be after elastic ones gave some back; else MemoryBudgetError with the table,
        before anything is allocated. An elastic holder needs ``shrink``."""
        if nbytes < 0 or floor < 0:
            raise InternalError(f"reservation of {nbytes} bytes with a floor of {floor}")
        if (kind == "elastic") != (shrink is not None):
            raise InternalError("elastic holders, and only they, have a shrink callback")
        made = Reservation(name, owner, kind, 0, floor, self, shrink)
        self._take(made, nbytes, new=True)
        return made

    def resize(self, limit: int) -> None:
        """Change the limit. Lowering asks elastic holders to give back; when they cannot give enough the limit stays
        as it was and MemoryBudgetError is raised (they may have given some)."""
        if limit < 1:
            raise ConfigError(f"a memory budget of {limit} bytes holds nothing", field="memory_budget", value=limit)
        for attempt in range(_ROUNDS + 1):
            with self._lock:
                over = _counted(self._held) - limit
                if over <= 0:
                    self._limit = limit
                    return
                wants = self._asked(over, None)
            if attempt == _ROUNDS or not wants:
                break
            _ask(wants)
        raise MemoryBudgetError(
            f"the budget cannot shrink to {human(limit)}: {human(self.held)} are held and cannot be given back\n"
            + self.table(),
            needed=self.held,
            available=limit,
            holders=self._by_holder(),
        )

    # ---- inside

    def _change(self, reservation: Reservation, nbytes: int) -> None:
        if nbytes < 0:
            raise InternalError(f"a reservation of {nbytes} bytes")
        self._take(reservation, nbytes, new=False)

    def _take(self, one: Reservation, nbytes: int, *, new: bool) -> None:
        for attempt in range(_ROUNDS + 1):
            with self._lock:
                if one.released:
                    raise InternalError(f"reservation {one.name!r} was released")
                before, one_before = _counted(self._held), one.bytes
                if new:
                    self._held.append(one)
                one.bytes = nbytes
                now = _counted(self._held)
                if now <= before or now <= self._limit:
                    self.peak = max(self.peak, now)
                    return
                one.bytes = one_before
                if new:
                    self._held.pop()
                wants = self._asked(now - self._limit, one)
            if attempt == _ROUNDS or not wants:
                break
            _ask(wants)
        raise self._refused(one, nbytes)

    def _asked(self, over: int, but: Reservation | None) -> list[_Want]:
        """How ``over`` bytes can come back: from each elastic holder in proportion to what it has above its floor."""
        elastic = [r for r in self._held if r.kind == "elastic" and r is not but and r.bytes > r.floor]
        spare = sum(r.bytes - r.floor for r in elastic)
        if spare < over:
            return []
        wants = []
        for r in elastic:
            part = -(-(r.bytes - r.floor) * over // spare)
            wants.append(_Want(r, max(r.floor, r.bytes - part)))
        return wants

    def _refused(self, one: Reservation, nbytes: int) -> MemoryBudgetError:
        spare = sum(r.bytes - r.floor for r in self._elastic() if r is not one)
        left = max(0, self._limit - self.held) + spare
        return MemoryBudgetError(
            f"{one.owner + ': ' if one.owner else ''}{one.name} needs {human(nbytes)}, but the budget of "
            f"{human(self._limit)} on {self.device} has {human(left)} left\n" + self.table(),
            needed=nbytes,
            available=left,
            holders=self._by_holder(),
        )

    def _elastic(self) -> Iterator[Reservation]:
        with self._lock:
            held = list(self._held)
        return (r for r in held if r.kind == "elastic" and r.bytes > r.floor)

    def _by_holder(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for h in self.holdings():
            name = f"{h.owner}: {h.name}" if h.owner else h.name
            found[name] = found.get(name, 0) + h.bytes
        return found

    def _forget(self, reservation: Reservation) -> None:
        with self._lock:
            reservation.released = True
            reservation.bytes = 0
            reservation.shrink = None  # whoever keeps the line keeps nothing else
            self._held = [r for r in self._held if r is not reservation]


def _counted(held: list[Reservation]) -> int:
    workspace = max((r.bytes for r in held if r.kind == "workspace"), default=0)
    return workspace + sum(r.bytes for r in held if r.kind != "workspace")


def _ask(wants: list[_Want]) -> None:
    for want in wants:
        if want.reservation.shrink is not None and not want.reservation.released:
            want.reservation.shrink(want.keep)


@dataclass(slots=True)
class SharedBudgets:
    """The budgets that engines of this process share, one a device, for as long as one of them is open."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    budgets: weakref.WeakValueDictionary[str, MemoryBudget] = field(default_factory=weakref.WeakValueDictionary)

    def get(
        self,
        device: str,
        *,
        fraction: float | None = None,
        limit: int | None = None,
        host: HostMemory | None = None,
    ) -> MemoryBudget:
        """See :func:`shared_budget`."""
        with self.lock:
            known = self.budgets.get(device)
            if known is None or not known.holdings():  # closed engines have no say
                known = self.budgets[device] = MemoryBudget.of(device, fraction=fraction, limit=limit, host=host)
                return known
        if fraction is None and limit is None:
            return known
        asked = limit if limit is not None else int(known.total * (fraction or 0.0))
        if asked != known.limit:
            option, value = ("memory_budget", limit) if limit is not None else ("memory_fraction", fraction)
            raise ConfigError(
                f"{option}={value}: another engine of this process has set a budget of {human(known.limit)} for "
                f"{device}, which they share; give the same, leave it out, or close that engine first",
                field=option,
                value=value,
            )
        return known


_shared = SharedBudgets()


def shared_budget(
    device: str, *, fraction: float | None = None, limit: int | None = None, host: HostMemory | None = None
) -> MemoryBudget:
    """The budget that everything this process opens on a device shares: made by whoever comes first, kept while
    somebody holds it. ConfigError when a later caller asks for another size."""
    return _shared.get(device, fraction=fraction, limit=limit, host=host)
