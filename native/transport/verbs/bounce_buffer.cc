#include "transport/verbs/bounce_buffer.h"

#include <algorithm>
#include <string>

#include "kernels/kernels.h"

namespace hetcoll {

const std::byte* BounceBuffer::Out(std::uint64_t seq, const std::byte* from, std::size_t& n) {
  if (!out_.begun || out_.seq != seq) {
    Begin(Way::kOut, out_, pinned_.data(), from, std::min(n, most()));
    out_.seq = seq;
  }
  if (!Ended(Way::kOut, out_)) return nullptr;
  n = std::min(n, out_.nbytes);
  return pinned_.data();
}

bool BounceBuffer::In(std::byte* to, const std::byte* from, std::size_t& n) {
  if (!in_.begun) {
    std::byte* here = pinned_.data() + most();
    const std::size_t nbytes = std::min(n, most());
    CopyBytes(here, from, nbytes);
    Begin(Way::kIn, in_, to, here, nbytes);
  }
  if (!Ended(Way::kIn, in_)) return false;
  n = std::min(n, in_.nbytes);
  return true;
}

// One that was begun before and is forgotten ends first, as copies of one way do.
void BounceBuffer::Begin(Way way, Piece& piece, void* dst, const void* src, std::size_t n) {
  try {
    copier_->Copy(way, dst, src, n);
    piece.mark = copier_->Mark(way);
  } catch (const Fault& fault) {
    Refused(way, fault);
  }
  piece.nbytes = n;
  piece.begun = true;
}

bool BounceBuffer::Ended(Way way, Piece& piece) {
  try {
    if (!copier_->Passed(way, piece.mark)) return false;
  } catch (const Fault& fault) {
    Refused(way, fault);
  }
  piece.begun = false;
  return true;
}

void BounceBuffer::Refused(Way way, const Fault& fault) const {
  throw Fault(fault.kind, peer_,
              "verbs: no rail to rank " + std::to_string(peer_) + " is left, and to go on over TCP a copy " +
                  (way == Way::kIn ? "to" : "out of") + " the GPU's memory failed: " + fault.what());
}

}  // namespace hetcoll
