"""The kernels of a GPU: which there are, their source, how they are compiled and where the results are kept.

A module is compiled when one of its kernels is first asked for. It holds what is short of one data type; what takes a
second is a module of its own (``exchange_<dtype>_<op>``). What a compiler makes is kept on disk, under a name made from
everything that it depends on.

Kernels (native signatures stand in ``*.h`` beside this file; counts are elements, 64 bits):

``reduce_<dtype>_<op>(dst, a, b, count)``
    dst = a (op) b, any alignment; dst may be a or b. AVG reduces as SUM.
``scale_<dtype>(dst, src, count, divisor)``
    dst = src / divisor, AVG's second half; dst may be src; integers truncate toward zero.
``oneshot_<dtype>_<op>(Oneshot)``
    The all-reduce of small messages in one host (``oneshot.h``). AVG is SUM with a divisor.
``bump(counter, base, offset)``, ``await(counter, base, offset, abort)``
    Signals and waits as kernels of one thread (``signals.h``).
``messages(Messages)``
    All small messages of a call among the GPUs of one host, each way with any ranks (``messages.h``).
``place_tokens(Tokens)``, ``number_tokens``, ``tell_tokens``, ``pack_tokens_<dtype>``, ``spread_...``, ``weigh_...``,
``sum_...``
    Tokens of a mixture of experts (``tokens.h``): where they belong; what travels; their weighted sums.
``convert_<dtype>_<dtype>(dst, src, count)``, ``common_<dtype>(dst, src, count)``
    8-bit floats of OCP's kind and AMD's older one: to the other kind, or to what both hold (``convert.h``). dst may be
    src.
``round_<dtype>_<format>(dst, src, residual, count)``, ``encode_...(wire, src, count)``,
``decode_...(dst, wire, count)``, ``add_...(dst, x, wire, count)``
    What goes over compressed edges (``codecs.h``): rounded, with what was lost before (`residual` may be null); as
    codes; back; and added to x. dst may be src or x.
``fold_<dtype>(Fold)``, ``compare_<dtype>(Comparison)``
    What HETCOLL_CHECK does at replays of graphs (``folds.h``, ``checks.h``).

16- and 8-bit floats are computed in float32 and rounded once. The results have the bits of the host's kernels, but
that any NaN is as good as another.
"""

from __future__ import annotations

from .cache import Cache, kept
from .source import codec_names, convert_name, modules, oneshot_name, reduce_name, reductions, scale_name, source
from .table import ONESHOT_RANKS, Compiler, KernelTable, Loader, Oneshot

__all__ = [
    "ONESHOT_RANKS",
    "Cache",
    "Compiler",
    "KernelTable",
    "Loader",
    "Oneshot",
    "codec_names",
    "convert_name",
    "kept",
    "modules",
    "oneshot_name",
    "reduce_name",
    "reductions",
    "scale_name",
    "source",
]
