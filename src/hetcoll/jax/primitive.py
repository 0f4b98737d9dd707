"""The one JAX primitive behind all functions, and its rules. What JAX does not offer publicly is imported here alone.

It has an *ordered* effect: JAX threads a token through all of a program's calls, loops and branches included, and from
one program to the next, so they run once each and in the order in which they were traced. The token is an argument and
a result of the custom call.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.ffi
from jax._src import dispatch, effects
from jax._src.interpreters.mlir import custom_call, full_like_aval
from jax.core import ShapedArray
from jax.extend.core import Effect, Primitive
from jax.interpreters import ad, batching, mlir

from .handler import register
from .operations import Operation

TARGET = "hetcoll"
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}  # JAX's names and XLA's


class Ordered(Effect):
    """Of every call; all instances are one and the same effect."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered)

    def __hash__(self) -> int:
        return hash(Ordered)

    def __repr__(self) -> str:
        return "hetcoll"


for allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    allowed.add_type(Ordered)

_ORDERED = Ordered()
primitive = Primitive("hetcoll")
primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))


def bind(x: Any, operation: Operation) -> Any:
    """Make a call."""
    return primitive.bind(x, operation=operation)


def _abstract(x: Any, *, operation: Operation) -> tuple[Any, set[Effect]]:
    return ShapedArray(operation.out_shape(x.shape), x.dtype), {_ORDERED}


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, operation: Operation) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    if type(tangent) is ad.Zero:
        y = bind(x, operation)
        return y, ad.Zero.from_primal_value(y)
    if not operation.differentiable():
        raise NotImplementedError(
            f"hetcoll.jax.{operation.NAME}: derivatives exist for op 'sum' and 'avg', not for {operation.words()[0]!r}"
        )
    return bind(x, operation), bind(tangent, operation)


def _transpose(cotangent: Any, x: Any, *, operation: Operation) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    return [bind(*operation.transpose(cotangent))]


def _batch(args: Sequence[Any], axes: Sequence[Any], *, operation: Operation) -> tuple[Any, Any]:
    (x,), (axis,) = args, axes
    moved, after = operation.batch(x, axis)
    return bind(moved, operation), after


def _lower(device: str, ctx: mlir.LoweringRuleContext, x: Any, *, operation: Operation) -> list[Any]:
    """A custom call on the token and, where they matter on this rank, argument and result."""
    (in_aval,), (out_aval,) = ctx.avals_in, ctx.avals_out
    sent = [(x, _row_major(in_aval))] if operation.sends else []
    received = [mlir.aval_to_ir_type(ctx.module_context, out_aval)] if operation.receives else []
    in_place = operation.IN_PLACE and operation.sends and operation.receives
    call = custom_call(
        TARGET,
        result_types=[mlir.token_type(), *received],
        operands=[ctx.tokens_in.get(_ORDERED), *(value for value, _ in sent)],
        backend_config={"call": mlir.ir_attribute(operation.call(device))},
        has_side_effect=True,
        api_version=4,
        operand_layouts=[(), *(layout for _, layout in sent)],
        result_layouts=[(), *(_row_major(out_aval) for _ in received)],
        operand_output_aliases={1: 1} if in_place else None,
    )
    ctx.set_tokens_out(mlir.TokenSet({_ORDERED: call.results[0]}))
    return [call.results[1] if operation.receives else full_like_aval(ctx, 0, out_aval)]


def _row_major(aval: Any) -> tuple[int, ...]:
    return tuple(reversed(range(aval.ndim)))


def recover() -> None:
    """Wait until no program of this thread runs, and forget what failed.

    JAX orders each program after the one before, so when one has failed, all later ones of its thread would fail with
    the same error, whatever communicator they use.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()


primitive.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[primitive] = _jvp
ad.primitive_transposes[primitive] = _transpose
batching.primitive_batchers[primitive] = _batch
for name, xla_name in _PLATFORMS.items():
    register(TARGET, xla_name)
    mlir.register_lowering(primitive, functools.partial(_lower, name), platform=name)
atexit.register(recover)  # programs that still run end before communicators are closed
