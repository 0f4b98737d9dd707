// What a link sends, whichever rail carries it, or TCP: a header and payload behind it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/crc32c.h"
#include "transport/integrity.h"

namespace hetcoll {

struct Frame {
  std::uint64_t signature;
  std::uint64_t total;
  std::uint64_t seq;     // of the link, whichever rail carries it
  std::uint32_t nbytes;  // of payload, which follows
  std::uint32_t flags;
  std::uint32_t body = 0;   // kFrameChecked: of the payload (CRC32C)
  std::uint32_t check = 0;  // of what is before, where the link checks anything

  std::uint32_t Sum() const { return Crc32c(0, this, offsetof(Frame, check)); }
};
static_assert(sizeof(Frame) == 40);
inline constexpr std::uint32_t kFrameLent = 1;    // the sender waits until it is consumed
inline constexpr std::uint32_t kFrameDirect = 2;  // its payload was written where the receiver had allowed that
// Not part of the stream: their number is kNoSeq.
inline constexpr std::uint32_t kFrameProbe = 4;     // of the handshake
inline constexpr std::uint32_t kFrameInvite = 8;    // its payload is an ClearToSend
inline constexpr std::uint32_t kFrameProved = 16;   // the peer's probe came whole as well: data follows
inline constexpr std::uint32_t kFrameChecked = 32;  // its payload has a checksum
inline constexpr std::uint64_t kNoSeq = UINT64_MAX;

// Which frames have a checksum of their payload; headers all have one, unless nothing is checked.
class FrameSample {
 public:
  explicit FrameSample(Integrity integrity) : integrity_(integrity) {}

  // The next frame, with n bytes of a message.
  bool Take(std::uint64_t total, std::size_t n) {
    if (integrity_ == Integrity::kOff) return false;
    if (integrity_ == Integrity::kAll || total <= kSmall) return true;
    if (unchecked_ < kFramesOf * n) {
      unchecked_ += n;
      return false;
    }
    unchecked_ -= kFramesOf * n;
    return true;
  }

 private:
  Integrity integrity_;
  std::size_t unchecked_ = 0;  // bytes that went by, less those that checks were made for
};

}  // namespace hetcoll
