"""Two instances of the real vLLM on CPUs: one prefills, another decodes, and says what one alone would say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from ranks import Job, Ranks, wait_until
from vllm_serving import BLOCK, ENV, Asked, Engine, Said, die, preload_vllm, write_model

_FOUND = importlib.util.find_spec("vllm")
REAL = _FOUND is not None and _FOUND.origin is not None  # the fake is a folder
pytestmark = pytest.mark.skipif(not REAL, reason="vLLM is not installed; `make vllm` does it")

# Of less than a block, of whole blocks and of more; all end alike, so that only what was said before tells them apart.
PROMPTS = [[(first + 7 * at) % 256 for at in range(length)] + [3, 5] for first, length in
           ((1, BLOCK // 2), (2, BLOCK - 2), (3, 2 * BLOCK - 2), (4, 2 * BLOCK + 9))]  # fmt: skip
COUNT = 12
engine: Engine  # of this rank


if REAL:
    preload_vllm()


def begin(job: Job, model: str, port: int, sizes: tuple[int, int], policy: str, layerwise: bool) -> None:
    """Rank 0 prefills, rank 1 decodes."""
    global engine
    extra = {"address": f"127.0.0.1:{port}", "prefill_ranks": sizes[0], "decode_ranks": sizes[1], "timeout": 30.0}
    role = ("kv_producer", "kv_consumer")[job.rank]
    transfer: dict[str, Any] = {"kv_role": role, "kv_load_failure_policy": policy}
    transfer["kv_connector_extra_config"] = {**extra, "layerwise": layerwise}
    engine = Engine(model, transfer, sizes[job.rank])


def alone(_job: Job) -> list[list[int]]:
    """What an instance says by itself."""
    said = engine.answer({f"alone {at}": Asked(prompt, COUNT) for at, prompt in enumerate(PROMPTS)})
    return [said[f"alone {at}"].tokens for at in range(len(PROMPTS))]


def prefill(job: Job) -> list[dict[str, Any] | None]:
    """What the router hears of each prompt."""
    if job.rank == 1:
        return []
    params = {"do_remote_decode": True}
    said = engine.answer({f"first {at}": Asked(prompt, 1, params) for at, prompt in enumerate(PROMPTS)})
    return [said[f"first {at}"].params for at in range(len(PROMPTS))]


def decode(job: Job, told: list[dict[str, Any] | None]) -> tuple[list[Said], dict[str, int]]:
    """What is said of them then, and how many tokens of prompts came from where."""
    if job.rank == 0:
        engine.until_idle()
        return [], {}
    before = engine.prompts()
    asked = {f"then {at}": Asked(prompt, COUNT, told[at]) for at, prompt in enumerate(PROMPTS)}
    said = engine.answer(asked)
    after = engine.prompts()
    return [said[name] for name in asked], {source: after[source] - before[source] for source in after}


def lose(job: Job) -> tuple[Said, Said] | None:
    """The one that prefills dies when the other has asked it for a prompt; then there is another prompt."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if job.rank == 0:
        wait_until(lambda: bool(get_kv_transfer_group()._worker._asked), 60)
        die()
    params = [{"do_remote_prefill": True, "transfer_id": name} for name in ("lost", "later")]
    lost = engine.answer({"lost": Asked(PROMPTS[-1], COUNT, params[0])})["lost"]
    return lost, engine.answer({"later": Asked(PROMPTS[-1], COUNT, params[1])})["later"]


def end(_job: Job) -> None:
    engine.close()


@pytest.mark.parametrize(("policy", "layerwise"), [("recompute", False), ("fail", True)])
def test_one_prefills_another_decodes(tmp_path: Path, policy: str, layerwise: bool) -> None:
    with Ranks(2, ENV, join=False, tidy=False) as ranks:
        ranks.run(begin, write_model(tmp_path), free_port(), (1, 1), policy, layerwise, timeout=200)
        wanted, same = ranks.run(alone, timeout=60)
        assert wanted == same
        assert len(set(map(tuple, wanted))) == len(wanted), "what they say does not depend on what was said"
        told, _ = ranks.run(prefill, timeout=60)
        assert all(each["do_remote_prefill"] for each in told)
        _, (said, came) = ranks.run(decode, told, timeout=60)
        assert [each.tokens for each in said] == wanted
        total = sum(map(len, PROMPTS))
        # The last token of each is computed where the next one is.
        assert came == {"local_compute": len(PROMPTS), "external_kv_transfer": total - len(PROMPTS)} | dict.fromkeys(
            set(came) - {"local_compute", "external_kv_transfer"}, 0
        )
        died, outcome = ranks.outcomes(lose, timeout=90)
        assert died.died == 7
        assert outcome.error is None, outcome.trace
        lost, later = outcome.value
        assert (lost.why, lost.tokens) == (("length", wanted[-1]) if policy == "recompute" else ("error", []))
        assert (later.why, later.tokens) == ("length", wanted[-1])
        ranks.kill_all()


@pytest.mark.thorough
@pytest.mark.timeout(580)  # each worker imports vLLM for itself
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_with_other_tensor_parallel_sizes(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with Ranks(2, ENV, join=False, tidy=False) as ranks:
        ranks.run(begin, write_model(tmp_path), free_port(), sizes, "fail", False, timeout=400)
        wanted, same = ranks.run(alone, timeout=60)
        assert wanted == same
        told, _ = ranks.run(prefill, timeout=60)
        _, (said, came) = ranks.run(decode, told, timeout=60)
        assert [each.tokens for each in said] == wanted
        assert came["local_compute"] == len(PROMPTS)
        ranks.run(end, timeout=60)
        ranks.kill_all()
