"""The applications of drills with several guests: which guests, what runs in each, what holds across their databases.

`guest/tier.py` is what runs; here is how the tiers are put together, and the invariants that `invariants.py` checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .guest import WEB_PORT
from .net import GuestNet


@dataclass(frozen=True)
class Place:
    """A guest of an application."""

    name: str
    database: bool
    """Whether it has a protected disk with a database."""
    web: bool
    """Whether it has a web service."""
    front: bool = False
    """Whether clients talk to it."""
    aside: bool = False
    """Whether it has no part in what the others do, but only a page, or a database, for clients of its own."""


@dataclass(frozen=True)
class Application:
    """Guests that are one application, and what holds across their databases."""

    name: str
    places: tuple[Place, ...]
    chain: bool
    """Tiers that each write and ask the next; otherwise the front writes into two databases."""
    refers: dict[str, str]
    """In whose database the rows are that a database's rows refer to."""
    follows: dict[str, str]
    """Each row of this database was written after the same row of that one."""
    tells: tuple[str, ...]
    """The databases, in their order, whose newest rows the front's page tells of."""
    work_ms: dict[str, float]
    """Work in each web service, for each request."""

    @property
    def databases(self) -> list[str]:
        """The guests with a database."""
        return [place.name for place in self.places if place.database]

    @property
    def front(self) -> str:
        """The guest that clients talk to."""
        return next(place.name for place in self.places if place.front)

    def web(self, name: str, kind: str, nets: dict[str, GuestNet]) -> list[str] | None:
        """The arguments of a guest's web service, if it has one; `kind` is what its databases speak."""
        number, place = next((n, place) for n, place in enumerate(self.places) if place.name == name)
        if not place.web:
            return None
        words = ["--work-ms", f"{self.work_ms.get(name, 0):g}"]
        if place.aside:
            return words
        if not self.chain:
            for store in self.places:
                if store.database and not store.aside:
                    words += ["--store", f"{kind}:{nets[store.name].ip4}"]
            return words
        if place.database:
            words += ["--store", f"{kind}:127.0.0.1"]
        if number + 1 < len(self.places):
            words += ["--next", f"{nets[self.places[number + 1].name].ip4}:{WEB_PORT}"]
        return words


THREE_TIER = Application(
    name="three-tier",
    places=(
        Place("front", database=True, web=True, front=True),
        Place("middle", database=True, web=True),
        Place("back", database=True, web=True),
    ),
    chain=True,
    refers={"front": "middle", "middle": "back"},
    follows={"middle": "front", "back": "middle"},
    tells=("middle",),
    work_ms={"front": 1, "middle": 25, "back": 25},
)
"""PipeCloud's CompDB: a row in each tier, and none of them may be missing once the front has answered."""

TWO_WRITERS = Application(
    name="two-writers",
    places=(
        Place("a", database=True, web=False),
        Place("b", database=True, web=False),
        Place("front", database=False, web=True, front=True),
    ),
    chain=False,
    refers={"a": "b", "b": "a"},
    follows={},
    tells=("a", "b"),
    work_ms={"front": 1},
)
"""A transfer ledger in two databases: each transfer is written into one and then into the other."""

ONE_ASIDE = replace(TWO_WRITERS, places=(*TWO_WRITERS.places, Place("aside", database=False, web=True, aside=True)))
"""The same, and in the same group a web service that has nothing to do with it: what it says must never wait."""
