// Copies, compiled once per instruction set: a part of kernels.inc.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace hetcoll::HETCOLL_ISA_NAMESPACE {
namespace {

// ---- Pages by turns ----

// Calls part(at) for the parts of whole groups of four pages: kPart bytes of one before the next one's turn. Returns
// where these end.
template <std::size_t kPart, class Part>
HETCOLL_INLINE std::size_t ByPages(std::size_t nbytes, Part part) {
  constexpr std::size_t kPage = 4096, kPages = 4;
  std::size_t at = 0;
  for (; at + kPages * kPage <= nbytes; at += kPages * kPage) {
    for (std::size_t i = 0; i < kPage; i += kPart) {
      for (std::size_t page = at + i; page < at + kPages * kPage; page += kPage) part(page);
    }
  }
  return at;
}

// ---- Copies, and what goes past the cache ----

// Less than a vector.
__attribute__((noinline)) void CopyShort(char* dst, const char* src, std::size_t nbytes) {
  CopySmall(dst, src, nbytes);
}

// At least kLine bytes. The first and the last line are unaligned and may overlap the aligned ones between them.
template <bool kStream>
HETCOLL_INLINE void CopyLines(char* dst, const char* src, std::size_t nbytes) {
  CopyEnds<kLine>(dst, src, nbytes);
  std::size_t i = kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine;
#pragma GCC unroll 4
  for (; i + kLine < nbytes; i += kLine) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kLine; j += kWidth) {
      const auto v = Load<Vector<char, kWidth>>(src + i + j);
      kStream ? StoreStream(dst + i + j, v) : Store(dst + i + j, v);
    }
  }
}

// Below this, waiting for the stores to arrive costs more than the cache gains.
constexpr std::size_t kStreamBytes = 4096;

// A word into each of the lines that begin in [at, end).
HETCOLL_INLINE void Claim(char* at, const char* end) {
  for (; at < end; at += kLine) Store(at, std::uint64_t{0});
}

// CopyLines, a few lines at a time so that they are claimed while they are at hand. Claims never overtake reads.
template <bool kStream>
HETCOLL_INLINE void TakeLines(char* dst, char* src, std::size_t nbytes) {
  CopyEnds<kLine>(dst, src, nbytes);
  std::size_t i = kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine;
  std::size_t claimed = 0;
  for (; i + 4 * kLine <= nbytes; i += 4 * kLine) {
#pragma GCC unroll 16
    for (std::size_t j = 0; j < 4 * kLine; j += kWidth) {
      const auto v = Load<Vector<char, kWidth>>(src + i + j);
      kStream ? StoreStream(dst + i + j, v) : Store(dst + i + j, v);
    }
    Claim(src + claimed, src + claimed + 4 * kLine);
    claimed += 4 * kLine;
  }
  for (; i + kLine < nbytes; i += kLine) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kLine; j += kWidth) Store(dst + i + j, Load<Vector<char, kWidth>>(src + i + j));
  }
  Claim(src + claimed, src + nbytes);
}

void Take(char* dst, char* src, std::size_t nbytes, bool stream) {
  if (nbytes <= kSmallCopy) {
    CopySmall(dst, src, nbytes);
    return Claim(src, src + nbytes);
  }
  if (!stream || nbytes < kStreamBytes) return TakeLines<false>(dst, src, nbytes);
  TakeLines<true>(dst, src, nbytes);
  StoreFence();
}

void CopyPlain(char* dst, const char* src, std::size_t nbytes) {
  if (nbytes <= kSmallCopy) return CopySmall(dst, src, nbytes);
  CopyLines<false>(dst, src, nbytes);
}

void CopyPages(char* dst, const char* src, std::size_t nbytes) {
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) % kLine;  // stores do not straddle lines
  CopySmall(dst, src, head);
  const std::size_t rest = head + ByPages<512>(nbytes - head, [=](std::size_t at) HETCOLL_LAMBDA {
#pragma GCC unroll 4
                             for (std::size_t i = head + at; i < head + at + 512; i += kWidth) {
                               Store(dst + i, Load<Vector<char, kWidth>>(src + i));
                             }
                           });
  CopyPlain(dst + rest, src + rest, nbytes - rest);
}

void Copy(char* dst, const char* src, std::size_t nbytes, Sweep sweep) {
  if (sweep == Sweep::kPlain || nbytes < kStreamBytes) return CopyPlain(dst, src, nbytes);
  if (sweep == Sweep::kPages) return CopyPages(dst, src, nbytes);
  CopyLines<true>(dst, src, nbytes);
  StoreFence();
}

}  // namespace
}  // namespace hetcoll::HETCOLL_ISA_NAMESPACE
