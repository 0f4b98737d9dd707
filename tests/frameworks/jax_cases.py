"""What test_jax.py beside it runs on every rank: functions of a communicator. `test_jax.py` says what each is about."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import wait_until

import hetcoll
import hetcoll.jax as hj

Comm = hetcoll.Communicator
Local = Callable[[Any], Any]
"""What a rank calls."""
Whole = Callable[[Any], Any]
"""The same for all ranks at once, on what all have, along axis 0: the reference, in one process."""


def _inputs(comm: Comm, *shape: int, dtype: Any = jnp.float32) -> Any:
    """What all ranks have, by rank: small multiples of six, so that sums, halves and thirds are exact."""
    count = comm.size * int(np.prod(shape))
    return jnp.asarray(((np.arange(count) * 7 + 3) % 11 * 6).reshape(comm.size, *shape).astype(dtype))


def _operations(comm: Comm, root: int = 1) -> dict[str, tuple[Local, Whole]]:
    """Every function that has a derivative; its argument has the leading axis of ranks."""
    n = comm.size
    ring = [(r, (r + 1) % n) for r in range(n)]
    at_root = (jnp.arange(n) == root).astype(jnp.float32)

    def only_root(x: Any) -> Any:
        return x * at_root.astype(x.dtype).reshape(n, *(1,) * (x.ndim - 1))

    def everywhere(x: Any) -> Any:
        return jnp.broadcast_to(x, (n, *x.shape))

    return {
        "allreduce": (lambda x: hj.allreduce(x, comm=comm), lambda x: everywhere(x.sum(0))),
        "allreduce avg": (lambda x: hj.allreduce(x, "avg", comm=comm), lambda x: everywhere(x.sum(0) / n)),
        "allgather": (lambda x: hj.allgather(x, comm=comm), everywhere),
        "reduce_scatter": (lambda x: hj.reduce_scatter(x, comm=comm), lambda x: x.sum(0)),
        "reduce_scatter avg": (lambda x: hj.reduce_scatter(x, "avg", comm=comm), lambda x: x.sum(0) / n),
        "alltoall": (lambda x: hj.alltoall(x, comm=comm), lambda x: jnp.swapaxes(x, 0, 1)),
        "broadcast": (lambda x: hj.broadcast(x, root, comm=comm), lambda x: everywhere(x[root])),
        "reduce": (lambda x: hj.reduce(x, root=root, comm=comm), lambda x: only_root(everywhere(x.sum(0)))),
        "reduce avg": (lambda x: hj.reduce(x, "avg", root, comm=comm), lambda x: only_root(everywhere(x.sum(0) / n))),
        "sendrecv": (
            lambda x: hj.sendrecv(x, (comm.rank + 1) % n, (comm.rank - 1) % n, comm=comm),
            lambda x: jnp.roll(x, 1, 0),
        ),
        "ppermute": (lambda x: hj.ppermute(x, ring, comm=comm), lambda x: jnp.roll(x, 1, 0)),
        "ppermute, some": (
            lambda x: hj.ppermute(x, [(0, 1)], comm=comm),
            lambda x: jnp.zeros_like(x).at[1].set(x[0]),
        ),
        "ppermute, none": (lambda x: hj.ppermute(x, [], comm=comm), jnp.zeros_like),
        "ppermute to itself": (lambda x: hj.ppermute(x, [(r, r) for r in range(n)], comm=comm), lambda x: x),
    }


def _same(found: Any, wanted: Any, what: object = "") -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (what, found, wanted)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), str(what))


def _close(found: Any, wanted: Any, what: object = "") -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (what, found, wanted)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5, err_msg=str(what))


def under_jit(comm: Comm) -> None:
    operations = _operations(comm)
    kinds = (((comm.size, 5, 3), jnp.float32), ((comm.size, 1), jnp.int32), ((comm.size, 0), jnp.float32))
    wholes = [_inputs(comm, *shape, dtype=dtype) for shape, dtype in kinds]
    found = jax.jit(lambda xs: [{name: f(x) for name, (f, _) in operations.items()} for x in xs])(
        [whole[comm.rank] for whole in wholes]
    )
    wanted = jax.jit(lambda xs: [{name: f(x) for name, (_, f) in operations.items()} for x in xs])(wholes)
    for (shape, dtype), ours, reference in zip(kinds, found, wanted, strict=True):
        for name in operations:
            _same(ours[name], reference[name][comm.rank].astype(dtype), (name, shape))


def without_jit(comm: Comm) -> None:
    whole = np.asarray(_inputs(comm, comm.size, 4))
    for name in ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "sendrecv"):
        local, reference = _operations(comm)[name]
        _same(local(whole[comm.rank]), reference(jnp.asarray(whole))[comm.rank], name)  # NumPy arrays will do
    one = hj.allreduce(comm.rank + 1, "max", comm=comm)  # and so do numbers
    assert (one.shape, int(one)) == ((), comm.size)


def reductions_and_types(comm: Comm) -> None:
    cases = [(op, dtype) for dtype in ("float32", "int32", "uint8") for op in ("sum", "max", "min", "prod")]
    cases += [("sum", d) for d in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "int8")]
    cases += [("lor", "bool"), ("land", "bool"), ("bxor", "int32"), ("max", "bfloat16")]
    reduce = {
        "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "lor": np.any, "land": np.all,
        "bxor": np.bitwise_xor.reduce,
    }  # fmt: skip
    whole = np.arange(comm.size * 9).reshape(comm.size, 9) * 7 % 5 % 3  # what comes out is exact in all of these types
    mine = {f"{op} {dtype}": jnp.asarray(whole[comm.rank].astype(jnp.dtype(dtype))) for op, dtype in cases}
    found = jax.jit(lambda m: {k: hj.allreduce(x, k.split()[0], comm=comm) for k, x in m.items()})(mine)
    for op, dtype in cases:
        _same(found[f"{op} {dtype}"], reduce[op](whole, axis=0).astype(jnp.dtype(dtype)), (op, dtype))


def gradients(comm: Comm) -> None:
    operations = _operations(comm)
    random = np.random.default_rng(3)
    xs = {name: random.normal(size=(comm.size, comm.size, 4)).astype("f") for name in operations}
    weights = {name: random.normal(size=comm.size).astype("f") for name in operations}

    def loss(mine: Any) -> Any:
        """Of this rank: unlike on each."""
        return sum(
            (weights[name][comm.rank] * jnp.tanh(local(jnp.sin(mine[name])) / 3)).sum()
            for name, (local, _) in operations.items()
        )

    def total(every: Any) -> Any:
        """Of all ranks together, in one process."""
        return sum(
            (jnp.tanh(whole(jnp.sin(every[name])) / 3).reshape(comm.size, -1).sum(1) * weights[name]).sum()
            for name, (_, whole) in operations.items()
        )

    mine = {name: x[comm.rank] for name, x in xs.items()}
    found, wanted = jax.jit(jax.grad(loss))(mine), jax.jit(jax.grad(total))(xs)
    for name in operations:
        _close(found[name], wanted[name][comm.rank], name)
    # Forwards: the derivative along a direction, which is that of each rank's own loss.
    along = jax.tree.map(np.cos, xs)
    _, here = jax.jit(lambda x, t: jax.jvp(loss, (x,), (t,)))(mine, {k: t[comm.rank] for k, t in along.items()})
    _, whole_change = jax.jit(lambda x, t: jax.jvp(total, (x,), (t,)))(xs, along)
    _close(hj.allreduce(here, comm=comm), whole_change)


def gradients_without_jit(comm: Comm) -> None:
    x = jnp.arange(4.0) + comm.rank
    found = jax.grad(lambda x: (comm.rank + 1) * (hj.allreduce(x, comm=comm) ** 2).sum())(x)
    every = jnp.arange(4.0) + jnp.arange(comm.size)[:, None]
    _close(found, 2 * every.sum(0) * sum(range(1, comm.size + 1)))
    value, pullback = jax.vjp(lambda x: hj.allgather(x, comm=comm), x)
    _same(value, every)
    _same(pullback(jnp.ones_like(value))[0], jnp.full(4, float(comm.size)))


def messages(comm: Comm) -> None:
    """A pipeline of two stages in two programs."""
    if comm.rank > 1:
        return
    x, w = jnp.arange(1.0, 5.0), jnp.array([2.0, -1.0, 0.5, 3.0])

    def first(x: Any) -> Any:
        return hj.send(jnp.sin(x), 1, comm=comm).sum()

    def second(w: Any, like: Any) -> Any:
        return (w * hj.recv(like, 0, comm=comm) ** 2).sum()

    if comm.rank == 0:
        loss, gradient = jax.jit(jax.value_and_grad(first))(x)
        assert loss == 0
        _close(gradient, 2 * w * jnp.sin(x) * jnp.cos(x))
    else:
        loss, (by_w, by_like) = jax.jit(jax.value_and_grad(second, (0, 1)))(w, jnp.zeros(4))
        _close(loss, (w * jnp.sin(x) ** 2).sum())
        _close(by_w, jnp.sin(x) ** 2)
        _same(by_like, jnp.zeros(4))


def vmapped(comm: Comm) -> None:
    operations = _operations(comm)
    wholes = {axis: _inputs(comm, *np.insert([comm.size, 4], axis, 5)) for axis in (0, 1, 2)}

    def calls(mine: Any, axis: int, out: int) -> Any:
        return {name: jax.vmap(local, axis, out)(mine) for name, (local, _) in operations.items()}

    every = ((0, 0), (1, 1), (2, 0))
    found = jax.jit(lambda m: [calls(m[axis], axis, out) for axis, out in every])(
        {axis: whole[comm.rank] for axis, whole in wholes.items()}
    )
    wanted = jax.jit(
        lambda w: [
            {name: jax.vmap(reference, axis + 1, out + 1)(w[axis]) for name, (_, reference) in operations.items()}
            for axis, out in every
        ]
    )(wholes)
    for axes, results, reference in zip(every, found, wanted, strict=True):
        for name in operations:
            _same(results[name], reference[name][comm.rank], (name, axes))
    # The gradient of a batch, and a batch of gradients.
    batch = _inputs(comm, 5, 4)[comm.rank]
    each = jax.jit(jax.vmap(jax.grad(lambda x: (hj.allreduce(x, comm=comm) ** 2).sum())))(batch)
    at_once = jax.jit(jax.grad(lambda x: (jax.vmap(lambda x: hj.allreduce(x, comm=comm))(x) ** 2).sum()))(batch)
    _close(each, at_once)


def control_flow(comm: Comm) -> None:
    n = comm.size

    def step(reduce: Local, carry: Any, t: Any) -> Any:
        carry = jnp.sin(reduce(carry) * t)
        return carry, carry.sum()

    def scanned(reduce: Local, x: Any) -> Any:
        return jax.lax.scan(lambda c, t: step(reduce, c, t), x, jnp.arange(1.0, 4.0))[1].sum()

    def own(x: Any) -> Any:
        return hj.allreduce(x, "avg", comm=comm)

    def reference(every: Any) -> Any:
        return jnp.broadcast_to(every.mean(0), every.shape)

    every = np.cos(np.arange(n * 4.0)).reshape(n, 4).astype("f")
    mine, wanted = every[comm.rank], jax.jit(jax.grad(lambda e: scanned(reference, e)))(every)[comm.rank]
    for wrap in (lambda f: f, jax.checkpoint):
        _close(jax.jit(jax.grad(wrap(lambda x: scanned(own, x))))(mine), wanted)

    def count(x: Any) -> Any:
        """Rounds until the ranks together have enough: as many on all."""
        return jax.lax.while_loop(
            lambda c: c[1] < 100.0, lambda c: (c[0] + 1, c[1] + hj.allreduce(x, comm=comm).sum()), (0, 0.0)
        )

    rounds, _ = jax.jit(count)(jnp.full(2, comm.rank + 1.0))
    assert int(rounds) == -(-100 // (n * (n + 1)))
    chosen = jax.jit(
        lambda p, x: jax.lax.cond(p, lambda x: hj.allreduce(x, comm=comm), lambda x: hj.broadcast(x, comm=comm), x)
    )
    whole = _inputs(comm, 3)
    _same(chosen(True, whole[comm.rank]), whole.sum(0))
    _same(chosen(False, whole[comm.rank]), whole[0])
    times = jax.jit(
        lambda x: jax.lax.fori_loop(
            0, 50, lambda i, x: hj.sendrecv(x, (comm.rank + 1) % n, (comm.rank - 1) % n, comm=comm), x
        )
    )
    _same(times(whole[comm.rank]), whole[(comm.rank - 50) % n])


def order(comm: Comm) -> None:
    """Calls that nothing but their order connects, whose results nobody wants on one rank; two programs at once."""
    sizes = [1, 100_000, 3, 70_000, 17, 20_000, 2]

    def calls(x: Any) -> Any:
        found = [hj.allreduce(jnp.full(size, x + i), comm=comm) for i, size in enumerate(sizes)]
        found += [hj.allgather(jnp.full(size, x), comm=comm) for size in reversed(sizes)]
        return found[3 if comm.rank else 0].sum() * 0 + x

    before = comm.counters()["collectives"]
    assert float(jax.jit(calls)(1.0)) == 1.0
    if jax.default_backend() == "cpu":  # those of GPUs are not counted
        assert comm.counters()["collectives"] - before == 2 * len(sizes)

    def heavy(x: Any) -> Any:
        return jax.lax.fori_loop(0, 30, lambda i, x: jnp.sin(x @ x) / 100, x)

    slow = jax.jit(lambda x: hj.allreduce(heavy(x) * 0 + 1, comm=comm)[0, 0])
    quick = jax.jit(lambda x: hj.allgather(x, comm=comm))
    x = jnp.ones((300, 300)) * comm.rank
    results = [(slow(x), quick(x[0])) for _ in range(3)]  # dispatched, not awaited
    for first, second in results:
        assert float(first) == comm.size
        _same(second[:, 0], jnp.arange(float(comm.size)))


def in_place(comm: Comm) -> None:
    for name in ("allreduce", "broadcast"):
        local, whole = _operations(comm)[name]
        donating = jax.jit(local, donate_argnums=0)
        every = _inputs(comm, comm.size, 1000)
        x = every[comm.rank] + 0
        kept = x + 0
        address = x.unsafe_buffer_pointer()
        y = donating(x)
        assert y.unsafe_buffer_pointer() == address
        assert x.is_deleted()
        _same(y, whole(every)[comm.rank])
        _same(jax.jit(local)(kept), y)
        _same(kept, every[comm.rank])  # not donated, not written


def layouts(comm: Comm) -> None:
    """XLA may keep arrays in any layout; what is sent is row-major."""
    every = _inputs(comm, 4, 6)
    found = jax.jit(lambda x: hj.allgather(hj.allreduce(x.T, comm=comm).T, comm=comm))(every[comm.rank])
    _same(found[0], every.sum(0))
    order = "F" if comm.rank == 0 else "C"
    _same(hj.allreduce(np.asarray(every[comm.rank], order=order), comm=comm), every.sum(0))


def refusals(comm: Comm) -> None:
    """Errors at trace time: NumPy's and JAX's kinds, with their words, on the caller's line; nothing was sent."""
    n, x = comm.size, jnp.ones((comm.size + 1, 2))
    before = comm.counters()
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: hj.allreduce(jnp.ones(3, "int4"), comm=comm), TypeError, r"allreduce: dtype int4 of int4\[3\]"),
        (lambda: hj.allreduce(jax.random.key(0), comm=comm), TypeError, r"dtype key<fry>"),
        (lambda: hj.allreduce(x, comm=None), TypeError, r"allreduce: comm: wanted a hetcoll.Communicator, got None"),
        (lambda: hj.allreduce(x, "median", comm=comm), ValueError, r"float32\[\d,2\]: op: wanted one of sum"),
        (lambda: hj.allreduce(x, "bxor", comm=comm), ValueError, r"op: bxor is not defined on float32"),
        (lambda: hj.reduce_scatter(x, comm=comm), ValueError, rf"leading axis of {n}.*got float32\[{n + 1},2\]"),
        (lambda: hj.alltoall(jnp.ones(()), comm=comm), ValueError, r"got float32\[\]"),
        (lambda: hj.broadcast(x, n, comm=comm), ValueError, rf"root: wanted a rank in \[0, {n}\), got {n}"),
        (lambda: hj.ppermute(x, [(0, 1), (0, 0)], comm=comm), ValueError, "at most once as source"),
        (lambda: hj.ppermute(x, [3], comm=comm), ValueError, "perm: wanted pairs"),
        (lambda: hj.ppermute(x, None, comm=comm), ValueError, "perm: wanted pairs .*got None"),
        (lambda: hj.send(x, comm.rank, comm=comm), ValueError, "a message to oneself is a sendrecv"),
        (lambda: hj.sendrecv(x, comm.rank, (comm.rank + 1) % n, comm=comm), ValueError, "needs both to be rank"),
        (lambda: jax.grad(lambda x: hj.allreduce(x, "max", comm=comm).sum())(x), NotImplementedError, "not for 'max'"),
    ]  # fmt: skip
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()
        with pytest.raises(kind, match=text):
            jax.jit(lambda x, call=call: call())(1.0)
    assert comm.counters() == before


def mismatch(comm: Comm) -> str:
    """Every rank's error names both calls and the lines they were traced on."""
    sub = comm.split(0)
    calls = (
        jax.jit(lambda x: hj.allreduce(x, comm=sub)),
        jax.jit(lambda x: hj.allreduce(x, "max", comm=sub)),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"hetcoll\.CollectiveMismatchError: ") as caught:
        calls[min(comm.rank, 1)](jnp.ones(5)).block_until_ready()
    assert isinstance(sub.error, hetcoll.CollectiveMismatchError)
    sub.close()
    hj.recover()
    _same(hj.allreduce(jnp.ones(2), comm=comm), jnp.full(2, float(comm.size)))
    return str(caught.value)


def peer_left(comm: Comm) -> None:
    """A rank that is gone: the others' programs fail with its name, and other communicators go on."""
    sub = comm.split(0)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: hj.allreduce(x, comm=sub), x))
    program(jnp.ones(5)).block_until_ready()
    if comm.rank == 1:
        sub.close()
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"hetcoll.PeerLostError: .*rank 1"):
            program(jnp.ones(5)).block_until_ready()
        assert isinstance(sub.error, hetcoll.PeerLostError)
        sub.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"hetcoll.ClosedError: this communicator was closed"):
        program(jnp.ones(5)).block_until_ready()
    hj.recover()
    comm.barrier()
    _same(hj.allreduce(jnp.ones(2), comm=comm), jnp.full(2, float(comm.size)))


def aborted(comm: Comm) -> None:
    """A failure in a program that runs behind: its results raise, so do later programs, until `recover`."""
    sub = comm.split(0)
    again = jax.jit(lambda x: hj.allreduce(x, comm=comm))
    again(jnp.ones(2)).block_until_ready()

    def heavy(x: Any) -> Any:
        return jax.lax.fori_loop(0, 30, lambda i, x: jnp.sin(x @ x) / 100, x)

    program = jax.jit(lambda x: hj.allreduce(heavy(x), comm=sub))
    x = jnp.ones((300, 300))
    program(x).block_until_ready()
    comm.barrier()
    if comm.rank == 0:
        sub.abort("for a test")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"hetcoll.AbortedError: rank 0 called abort\(\): for a test"):
        program(x).block_until_ready()
    hj.recover()
    _same(again(jnp.ones(2)), jnp.full(2, float(comm.size)))
    sub.close()


def interrupted(comm: Comm) -> None:
    """Ctrl-C in a program that waits for others: a KeyboardInterrupt here, an AbortedError there."""
    sub = comm.split(0)
    program = jax.jit(lambda x: hj.allreduce(x, comm=sub))
    program(jnp.ones(5)).block_until_ready()
    before = sub.counters()["collectives"]

    def interrupt() -> None:
        wait_until(lambda: sub.counters()["collectives"] > before, 30)
        os.kill(os.getpid(), signal.SIGINT)

    if comm.rank == 0:
        watcher = threading.Thread(target=interrupt)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            program(jnp.ones(5)).block_until_ready()
        watcher.join()
    else:
        wait_until(lambda: sub.error, 60)
    assert isinstance(sub.error, hetcoll.AbortedError)
    hj.recover()
    sub.close()


def forgotten(comm: Comm) -> None:
    """A program does not keep its communicator alive, and says so."""
    sub = comm.split(0)
    program = jax.jit(lambda x, number: hj.allreduce(x, comm=number()), static_argnums=1)
    holder = [sub]
    compiled = program.lower(jnp.ones(2), lambda: holder[0]).compile()
    comm.barrier()
    sub.close()
    holder.clear()
    del sub, program
    jax.clear_caches()
    gc.collect()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"communicator of this call does not exist any more"):
        compiled(jnp.ones(2)).block_until_ready()
    hj.recover()


def data_parallel(comm: Comm) -> None:
    """A network trained on a part of each batch a rank, against one process with the whole batch."""
    random = np.random.default_rng(1)
    w = {"a": random.normal(size=(4, 8)).astype("f") / 2, "b": random.normal(size=(8, 1)).astype("f") / 3}
    x = random.normal(size=(comm.size * 6, 4)).astype("f")
    y = np.sin(x.sum(1, keepdims=True))

    def loss(w: Any, x: Any, y: Any) -> Any:
        return ((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2).mean()

    def train(average: Callable[[Any], Any], x: Any, y: Any) -> Any:
        def step(w: Any, _: Any) -> Any:
            value, gradient = average(jax.value_and_grad(loss)(w, x, y))
            return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value

        return jax.lax.scan(step, jax.tree.map(jnp.asarray, w), length=10)

    def average(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: hj.allreduce(leaf, "avg", comm=comm), tree)

    part = slice(comm.rank * 6, comm.rank * 6 + 6)
    found, losses = jax.jit(lambda x, y: train(average, x, y))(x[part], y[part])
    wanted, reference = jax.jit(lambda x, y: train(lambda tree: tree, x, y))(x, y)
    _close(losses, reference)
    jax.tree.map(_close, found, wanted)


def pair(comm: Comm, names: Sequence[str]) -> None:
    """Some of the above on ranks 0 and 1 alone."""
    sub = comm.split(0 if comm.rank < 2 else 1)
    if comm.rank < 2:
        for name in names:
            globals()[name](sub)
    sub.close()
