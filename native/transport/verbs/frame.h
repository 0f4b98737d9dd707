// What a link sends, whichever rail carries it, or TCP: a header and payload behind it.
#pragma once

#include <cstdint>

namespace hetcoll {

struct Frame {
  std::uint64_t signature;
  std::uint64_t total;
  std::uint64_t seq;     // of the link, whichever rail carries it
  std::uint32_t nbytes;  // of payload, which follows
  std::uint32_t flags;
};
static_assert(sizeof(Frame) == 32);
inline constexpr std::uint32_t kFrameLent = 1;    // the sender waits until it is consumed
inline constexpr std::uint32_t kFrameDirect = 2;  // its payload was written where the receiver had invited it to
// Not part of the stream: their number is kNoSeq.
inline constexpr std::uint32_t kFrameProbe = 4;    // of the handshake
inline constexpr std::uint32_t kFrameInvite = 8;   // its payload is an ClearToSend
inline constexpr std::uint32_t kFrameProved = 16;  // the peer's probe came whole as well: data follows
inline constexpr std::uint64_t kNoSeq = UINT64_MAX;

}  // namespace hetcoll
