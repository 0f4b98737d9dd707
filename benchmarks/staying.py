"""Ranks that stay for a whole benchmark: each answers a line of JSON on its standard input with one on its output."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class StayingRanks:
    """One process for each command line and environment. What they say on standard error goes to `log`.

    A question that is not answered by all within `seconds` ends all of them.
    """

    def __init__(
        self, name: str, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path, seconds: float
    ) -> None:
        self.name, self.log, self.seconds = name, log, seconds
        pipe = subprocess.PIPE
        with log.open("ab") as errors:
            self.ranks = [
                subprocess.Popen(words, env=env, text=True, stdin=pipe, stdout=pipe, stderr=errors)
                for words, env in commands
            ]

    def ask(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's answer. RuntimeError, with the end of what they said, where one ended or was late."""
        late = threading.Timer(self.seconds, self.kill)
        late.start()
        try:
            for process in self.ranks:
                assert process.stdin is not None
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            answers = [process.stdout.readline() for process in self.ranks if process.stdout is not None]
        except BrokenPipeError:
            answers = [""]
        finally:
            late.cancel()
        if not all(answers):
            raise RuntimeError(f"{self.name}: a rank ended at {question}: {self.log.read_text()[-6000:]}")
        return [json.loads(answer) for answer in answers]

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def close(self) -> None:
        """The end of their input is what ranks end at."""
        for process in self.ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
