"""The workers of the instance that decodes: they take slots, tell the other side, and wait for what comes.

Where it does not come, nothing of a request may be written any more before its blocks are given back: the senders have
ended it, or the windows are closed, and with them the hand-off.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import CollectiveTimeoutError, CommunicationError, Communicator, HetcollError
from ..handoff import Handoff, Receiving
from .meeting import Mailbox, Note, key_of
from .steps import Load, Report, Step

log = logging.getLogger("hetcoll.serving.vllm")


@dataclass
class _Incoming:
    load: Load
    receiving: Receiving | None  # None: there is no other side any more
    deadline: float
    given_up: bool = False


class DecodeWorker:
    """The first of the receivers, `leads`, tells the senders what all of them take."""

    def __init__(
        self, comm: Communicator, handoff: Handoff, mailbox: Mailbox, expand: Any, timeout: float, leads: bool
    ) -> None:
        self._comm, self._handoff, self._mailbox, self._expand = comm, handoff, mailbox, expand
        self._timeout, self._leads = timeout, leads
        self._incoming: list[_Incoming] = []
        self._slots: Counter[int] = Counter()  # that this worker is through with, untold
        self.lost = ""

    def flush(self, requests: Iterable[str]) -> None:
        """Nothing reads these blocks."""

    def begin(self, step: Step) -> None:
        for request in step.dropped:
            for each in self._incoming:
                if each.load.request == request:
                    self._give_up(each)

    def start(self, step: Step) -> None:
        """Take the slots, and ask for what is to come."""
        for load in step.loads:
            receiving = None if self.lost else self._handoff.receive(load.slot)
            self._incoming.append(_Incoming(load, receiving, time.monotonic() + self._timeout))
            if self._leads and receiving is not None:
                first = load.first * len(self._expand([0]))
                end = -(-load.tokens // self._handoff.dst.block_tokens)
                blocks = np.array(self._expand(load.blocks)[: max(end - first, 0)], np.int64)
                note = Note(load.slot, key_of(load.transfer), first, load.tokens, blocks)
                self._attempt(self._mailbox.post, note, self._timeout)

    def wait(self, layer: int) -> None:
        """For what this step computes with."""
        for each in self._incoming:
            if each.load.at_once and each.receiving is not None and not each.given_up:
                left = max(each.deadline - time.monotonic(), 1e-3)
                try:
                    each.receiving.wait(layer, left)
                except CommunicationError as error:
                    log.warning("%s: %s", each.load.request, error)
                    self._give_up(each)

    def results(self, finished: set[str]) -> tuple[set[str], set[str], set[int]]:
        """No requests that were sent; those that came, or never will; blocks in which there is not what should be."""
        if not self.lost and self._comm.error is not None:
            self._lose(self._comm.error)
        came: set[str] = set()
        bad: set[int] = set()
        for each in list(self._incoming):
            self._drive(each)
        for each in [each for each in self._incoming if each.receiving is None or each.receiving.ended]:
            self._incoming.remove(each)
            self._slots[each.load.slot] += 1
            if each.load.awaited:
                came.add(each.load.request)
            if not self._is_whole(each):
                bad.update(each.load.blocks)
        return set(), came, bad

    def _drive(self, each: _Incoming) -> None:
        """Give up what is late; what then does not end takes the whole hand-off with it."""
        receiving = each.receiving
        while receiving is not None and not receiving.ended:
            left = each.deadline - time.monotonic()
            if left > 0 and not each.load.at_once:
                return  # until the next step
            if left <= 0 and each.given_up:
                what = f"{each.load.request}: wanted the senders to end it within {self._timeout:g} s of giving up"
                self._lose(CollectiveTimeoutError(what))
            elif left <= 0:
                self._give_up(each)
            else:
                try:
                    receiving.close(left)
                except CollectiveTimeoutError:
                    continue
                except HetcollError as error:
                    self._lose(error)
            receiving = each.receiving  # None, where all is lost now

    def _is_whole(self, each: _Incoming) -> bool:
        if each.receiving is None:
            return False
        each.receiving.close()  # at once
        late = each.load.at_once and each.given_up  # the step has computed without it
        return each.receiving.complete and not late

    def _give_up(self, each: _Incoming) -> None:
        if each.receiving is not None and not each.given_up:
            each.given_up, each.deadline = True, time.monotonic() + self._timeout
            self._attempt(each.receiving.give_up, self._timeout)

    def _attempt(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except HetcollError as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Close the windows: from then on nobody writes the cache."""
        if not self.lost:
            self.lost = f"{type(error).__name__}: {error}"
            log.error("nothing is taken over from now on: %s", self.lost)
            self._handoff.close()
        for each in self._incoming:
            each.receiving = None

    def report(self) -> Report | None:
        if not self._slots and not self.lost:
            return None
        found, self._slots = Report(self._slots, self.lost), Counter()
        return found

    def close(self) -> None:
        with contextlib.closing(self._handoff):
            self._mailbox.close()
