// Compressed messages: what their ends do instead of a message's own. Elements are encoded to scratch and sent from
// there; codes come to scratch and are decoded. Transports and plans see messages of bytes as any others.
#include <algorithm>

#include "host/task.h"

namespace hetcoll {
namespace {

constexpr std::size_t kAhead = std::size_t{64} << 10;  // bytes, encoded or not: what stays in the cache

}  // namespace

// Encodes a little ahead of what the transport takes. What is sent was rounded before, so nothing is lost here.
bool Task::SendCodes(Links& links, BoundStep& s, std::size_t limit) {
  Port<SendEnd>& port = links.tx(s.peer, s.channel);
  const std::size_t had = codec_->Elements(s.coded), ready = limit / item_;
  bool moved = ready > had && s.coded - s.posted < kAhead;
  if (moved) {
    const std::size_t n = std::min(ready - had, kAhead / item_);  // whole blocks, or up to the end
    codec_->encode(Codes(s) + s.coded, Src(s) + had * item_, n);
    s.coded = codec_->Bytes(had + n);
  }
  if (s.coded > s.posted) {
    const std::ptrdiff_t n = port.end->Push(CodesOf(s), s.posted, Codes(s) + s.posted, s.coded - s.posted);
    if (n != kWouldBlock) {
      s.posted += static_cast<std::size_t>(n);
      port.taken += static_cast<std::uint64_t>(n);
      port.through += s.posted == s.wire;
      links.Touch(port);
      moved |= n > 0;
    }
  }
  const std::size_t free = s.posted - std::min(s.posted, port.end->Lent());
  const std::size_t done = codec_->Elements(free) * item_;
  moved |= done > s.done || free == s.wire;
  s.done = done;
  s.complete = free == s.wire;
  lends_ |= port.keeps && free < s.posted;
  return moved;
}

// The codes come to scratch as fast as they can, and are decoded as far as the step may go.
bool Task::RecvCodes(Links& links, BoundStep& s, std::size_t limit) {
  Port<RecvEnd>& port = links.rx(s.peer, s.channel);
  bool moved = false;
  if (s.coded < s.wire) {
    const std::ptrdiff_t n = port.end->Pull(CodesOf(s), s.coded, Codes(s) + s.coded, s.wire - s.coded, false);
    if (n != kWouldBlock) {
      s.coded += static_cast<std::size_t>(n);
      port.taken += static_cast<std::uint64_t>(n);
      port.through += s.coded == s.wire;
      links.Touch(port);
      moved = true;
    }
  }
  std::size_t came = codec_->Elements(s.coded);
  if (s.coded < s.wire) came -= came % kCodecBlock;
  const std::size_t from = s.done / item_, to = std::min(came, limit / item_);
  if (to > from) {
    const std::byte* codes = Codes(s) + codec_->Bytes(from);
    if (s.op == Op::kRecv) {
      codec_->decode(Dst(s) + s.done, codes, to - from);
    } else {
      ReduceCodes(Dst(s) + s.done, Src(s) + s.done, codes, to - from);
    }
    s.done = to * item_;
    s.complete = s.done == s.len;
    moved = true;
  }
  return moved;
}

void Task::ReduceCodes(std::byte* dst, const std::byte* src, const std::byte* codes, std::size_t count) {
  constexpr std::size_t kPart = 8 * kCodecBlock;  // stays in the L1 cache
  alignas(64) std::byte part[kPart * sizeof(float)];
  for (std::size_t at = 0; at < count; at += kPart) {
    const std::size_t n = std::min(kPart, count - at), byte = at * item_;
    codec_->decode(part, codes + codec_->Bytes(at), n);
    kernels_->reduce(dst + byte, src + byte, part, n, Sweep::kPlain);
  }
}

}  // namespace hetcoll
