"""How launchers find each other: each answers who it is, and whether it leads."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from jax_ring.launcher.multi_host.links import LINE_BYTES, Link

LEADS, FOLLOWS, SEARCHES = "leads", "follows", "searches"
_SECONDS = 1.0  # for an answer


class Answer(NamedTuple):
    """Of one launcher."""

    id: str  # random
    state: str  # LEADS, FOLLOWS or SEARCHES
    number: int  # of the last group that it knows to have started
    runs: bool  # whether it leads one that runs


Found = dict[str, Answer | None]  # by address; None where a machine is there, and nobody listens


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


async def ask(addresses: Iterable[str], silence: float) -> Found:
    """What listens at these addresses; without those that are silent."""
    found: Found = {}
    await asyncio.gather(*(_ask(address, silence, found) for address in addresses))
    return found


async def connected(address: str, silence: float) -> Link:
    """A connection to a launcher. Raises OSError if there is none."""
    async with asyncio.timeout(_SECONDS):
        return Link(*await asyncio.open_connection(*split(address), limit=LINE_BYTES), silence)


async def _ask(address: str, silence: float, found: Found) -> None:
    try:
        link = await connected(address, silence)
    except ConnectionRefusedError:
        found[address] = None
        return
    except OSError:
        return
    try:
        link.send({"ask": True})
        async with asyncio.timeout(_SECONDS):
            if message := await link.receive():
                found[address] = Answer(*message["answer"])
    except (TimeoutError, KeyError, TypeError):
        pass  # as if it were silent
    finally:
        link.abort()


def best_leader(found: Found, order: list[str]) -> str | None:
    """The address of the launcher to follow, of those that lead; earlier ones in `order` are preferred."""
    leaders = {address: each for address, each in found.items() if each and each.state == LEADS}

    def rank(address: str) -> tuple[int, bool, int]:
        place = order.index(address) if address in order else len(order)
        return leaders[address].number, leaders[address].runs, -place

    return max(leaders, key=rank, default=None)


async def serve(link: Link, answer: Answer) -> None:
    """Answers `ask`."""
    link.send({"answer": answer})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS):
            await link.receive()  # until the other side has it
    link.abort()
