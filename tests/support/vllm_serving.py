"""The real vLLM in ranks' processes, with a small model: its weights are random, and large enough that what is said at
the end follows from what was said at the beginning.

vLLM is imported by the server that ranks are forked from, and runs its engine in the rank's own process.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ranks import Env, preload

TOKENS, BLOCK, LAYERS = 256, 32, 3  # of the vocabulary, of a block
_WIDTH, _HEADS, _KV_HEADS, _DIM, _INNER = 64, 4, 2, 32, 96
ENV: Env = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore",
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


def preload_vllm() -> None:
    """For ranks that are started from now on, where none was before."""
    preload("hetcoll", "numpy", "pytest", "ranks", "vllm.entrypoints.llm")


def write_model(folder: Path) -> str:
    """A Llama with grouped heads."""
    from safetensors.numpy import save_file

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_size": _WIDTH,
        "intermediate_size": _INNER, "num_hidden_layers": LAYERS, "num_attention_heads": _HEADS, "head_dim": _DIM,
        "num_key_value_heads": _KV_HEADS, "vocab_size": TOKENS, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)

    def weight(out: int, into: int, gain: float = 1.0) -> Any:
        return (random.standard_normal((out, into)) * gain / np.sqrt(into)).astype(np.float32)

    ones = np.ones(_WIDTH, np.float32)
    found = {"model.embed_tokens.weight": weight(TOKENS, _WIDTH, 8.0), "model.norm.weight": ones}
    found["lm_head.weight"] = weight(TOKENS, _WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {f"{at}.input_layernorm.weight": ones, f"{at}.post_attention_layernorm.weight": ones}
        for name, heads in (("q", _HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            found[f"{at}.self_attn.{name}_proj.weight"] = weight(heads * _DIM, _WIDTH, 2.0)
        found[f"{at}.self_attn.o_proj.weight"] = weight(_WIDTH, _HEADS * _DIM, 2.0)
        for name in ("gate", "up"):
            found[f"{at}.mlp.{name}_proj.weight"] = weight(_INNER, _WIDTH)
        found[f"{at}.mlp.down_proj.weight"] = weight(_WIDTH, _INNER)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@dataclass(frozen=True)
class Asked:
    """A request: what was said, how many tokens follow, and what the router says of it."""

    prompt: list[int]
    count: int
    params: dict[str, Any] | None = None


@dataclass(frozen=True)
class Said:
    """What came of it."""

    tokens: list[int]
    why: str | None
    params: dict[str, Any] | None


class Engine:
    """One instance. `transfer`: of its KVTransferConfig, or None."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, ranks: int = 1) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if ranks > 1:  # whose workers are processes, which a daemon may not start
            mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        names = {"kv_connector": "HetcollConnector", "kv_connector_module_path": "hetcoll.serving.vllm"}
        self._llm = LLM(
            model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256, seed=1,
            block_size=BLOCK, kv_cache_memory_bytes=1 << 24, max_num_seqs=4, enable_prefix_caching=False,
            tensor_parallel_size=ranks, disable_log_stats=False,
            kv_transfer_config=None if transfer is None else KVTransferConfig(**names, **transfer),
        )  # fmt: skip

    def answer(self, asked: dict[str, Asked]) -> dict[str, Said]:
        """All at once, to their ends."""
        from vllm import SamplingParams

        engine, found = self._llm.llm_engine, dict[str, Said]()
        for name, each in asked.items():
            extra = {"kv_transfer_params": dict(each.params)} if each.params else None
            sampling = SamplingParams(
                temperature=0, max_tokens=each.count, ignore_eos=True, detokenize=False, extra_args=extra
            )
            engine.add_request(name, {"prompt_token_ids": each.prompt}, sampling)
        while len(found) < len(asked):
            for out in engine.step():
                if out.finished:
                    said = out.outputs[0]
                    found[out.request_id] = Said(list(said.token_ids), said.finish_reason, out.kv_transfer_params)
        return found

    def prompts(self) -> dict[str, int]:
        """Tokens of prompts since the start, as vLLM counts them: those computed here, and those that came."""
        found = {}
        for each in self._llm.get_metrics():
            if each.name == "vllm:prompt_tokens_by_source":
                found[each.labels["source"]] = int(each.value)
        return found

    def until_idle(self) -> None:
        """Steps until no request, also none that has finished, has blocks."""
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests() or engine.engine_core.engine_core.scheduler.has_requests():
            engine.step()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def die() -> None:
    os._exit(7)
