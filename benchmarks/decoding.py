"""Greedy decoding of the model of llama.py, by one process or on the default process group: tensor parallel, pipeline.

Each rank makes the same weights and keeps its part. By tensor parallel the products of a block are cut by heads and
hidden units, and an all-reduce adds what the ranks have; the logits are gathered. By pipeline the prompts are dealt
to as many groups as there are stages, so that each stage has one at work; the last stage sends the tokens to the first.
In graphs, a rank's part of a step is captured once, with its collectives, and replayed for each token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from llama import Block, Kept, Position, layers, whole
from shapes import Shape
from torch import Tensor, nn
from training_ways import made_on, stage_of

WAYS = ("one", "tensor", "stages")
WARM = 2  # tokens before time counts


class Summed(nn.Module):
    """The sum over ranks of what a layer gives on each."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        dist.all_reduce(y)
        return y


class Gathered(nn.Module):
    """What all ranks' rows of a layer give, side by side."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        mine: Tensor = self.inner(x).contiguous()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        return torch.cat(every, -1)


def keep(layer: nn.Linear, dim: int) -> nn.Linear:
    """Only this rank's rows (0) or columns (1) of a layer's weight."""
    part = layer.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    layer.weight = nn.Parameter(part.clone())
    return layer


def sliced(part: nn.Module, _at: int) -> nn.Module:
    """This rank's part of a part of the model."""
    if isinstance(part, Block):
        for layer in (part.query, part.key, part.value, part.gate, part.up):
            keep(layer, 0)
        part.out, part.down = (Summed(keep(layer, 1)) for layer in (part.out, part.down))
    elif isinstance(part, nn.Sequential):
        norm, head = part
        return nn.Sequential(norm, Gathered(keep(head, 0)))
    return part


class Decoder:
    """This rank's part of the model."""

    def __init__(self, s: Shape, way: str, device: torch.device, dtype: torch.dtype) -> None:
        self.way, self.device, self.shape, self.dtype = way, device, s, dtype
        self.rank: int = 0 if way == "one" else dist.get_rank()
        self.size: int = 1 if way == "one" else dist.get_world_size()
        stage, self.stages = (self.rank, self.size) if way == "stages" else (0, 1)
        if way == "tensor" and (s.shared_heads % self.size or s.vocabulary % self.size or s.hidden % self.size):
            raise ValueError(f"{self.size} ranks: wanted a divisor of {s.shared_heads} heads, and of what else is cut")
        self.first, self.last = stage == 0, stage == self.stages - 1
        begin, end = stage_of(s, stage, self.stages)

        def mine(part: nn.Module, at: int) -> nn.Module:
            return part if begin <= at < end else nn.Identity()

        cut: dict[str, Callable[[nn.Module, int], nn.Module]] = {"one": whole, "tensor": sliced, "stages": mine}
        with made_on(device, dtype):
            self.parts = layers(s, cut[way])[begin:end]
        self._gap = torch.full((), torch.inf, device=device)

    @property
    def gap(self) -> float:
        """The least between the best logit and the second best."""
        return float(self._gap)

    def decode(self, prompts: Tensor, count: int, begun: Callable[[], None], graphs: bool = False) -> list[list[int]]:
        """`count` tokens behind each prompt (rows of one length), the same on all ranks but that a stage before the
        last has none; `begun` is called behind the first WARM ones, when all that is captured is."""
        with torch.inference_mode():
            return self._decode(prompts, count, begun, graphs)

    def _decode(self, prompts: Tensor, count: int, begun: Callable[[], None], graphs: bool) -> list[list[int]]:
        groups = prompts.to(self.device).chunk(self.stages)
        most = prompts.shape[1] + count
        steps = [Step(self, most) for _ in groups]
        tokens: list[list[Tensor]] = [[] for _ in groups]
        sent: list[dist.Work | None] = []
        for number in range(count):
            if number == WARM:
                if graphs:
                    for step in steps:
                        step.capture()
                begun()
            for group, prompt in enumerate(groups):
                fresh = prompt if number == 0 else self._back(tokens[group], len(prompt))
                x = steps[group](self._before(fresh))
                if not self.last:
                    sent.append(dist.isend(x, self.rank + 1))
                    continue
                tokens[group].append(x)
                if self.stages > 1 and number < count - 1:
                    sent.append(dist.isend(x, 0))
        for work in sent:
            if work is not None:
                work.wait()
        found = [torch.stack(each, 1) for each in tokens if each]
        return torch.cat(found).tolist() if self.last else []

    def _back(self, tokens: list[Tensor], rows: int) -> Tensor:
        """The last tokens, which the last stage has chosen; later stages need no more than their number."""
        if self.last:
            return tokens[-1][:, None]
        came = torch.empty(rows, dtype=torch.int64, device=self.device)
        if self.first:
            dist.recv(came, self.size - 1)
        return came[:, None]

    def _before(self, fresh: Tensor) -> Tensor:
        """What this stage begins with: tokens, or what the stage before gives."""
        if self.first:
            return fresh
        came = torch.empty(*fresh.shape, self.shape.width, dtype=self.dtype, device=self.device)
        dist.recv(came, self.rank - 1)
        return came

    def run(self, x: Tensor, kept: list[Kept]) -> Tensor:
        """What the last stage makes of it are tokens."""
        for part, own in zip(self.parts, kept, strict=True):
            last = isinstance(part, nn.Sequential)  # whose logits are wanted of the last position alone
            x = part(x, own) if isinstance(part, Block) else part(x[:, -1:] if last else x)
        return self._best(x) if self.last else x.contiguous()

    def _best(self, logits: Tensor) -> Tensor:
        """Of the last position."""
        two = logits[:, -1].float().topk(2)
        torch.minimum(self._gap, (two.values[:, 0] - two.values[:, 1]).min(), out=self._gap)
        return two.indices[:, 0].contiguous()


class Step:
    """One token of a group of prompts: what comes in, and what the rank makes of it."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        self._decoder, self._position = decoder, Position(most, decoder.device)
        self._kept = [Kept(self._position) for _ in decoder.parts]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input = self._output = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self._graph is None:
            self._input, self._output = x, self._run(x)
            return self._output
        self._input.copy_(x)
        self._graph.replay()
        return self._output.clone()  # the next replay writes it again, and this may still be sent then

    def capture(self) -> None:
        """From now on what was done with the last input. Nothing is done yet."""
        self._input = self._input.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads call the driver, too
            self._output = self._run(self._input)
        self._graph = graph

    def _run(self, x: Tensor) -> Tensor:
        found = self._decoder.run(x, self._kept)
        self._position.move(x.shape[1])
        return found
