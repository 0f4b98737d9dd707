#include "transport/shm/private.h"

#include <sys/uio.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "base/clock.h"

namespace hetcoll {
namespace {

using Transfer = decltype(&process_vm_readv);

ssize_t Once(Transfer transfer, pid_t pid, void* here, std::uint64_t there, std::size_t n) {
  iovec local{here, n};
  iovec remote{reinterpret_cast<void*>(there), n};  // NOLINT: another process's
  return transfer(pid, &local, 1, &remote, 1, 0);
}

// Returns 0, or EFAULT.
int All(Transfer transfer, const ShmOwner& owner, int peer, std::byte* here, std::uint64_t there, std::size_t n,
        const char* what) {
  const pid_t pid = owner.pid.load(std::memory_order_relaxed);
  for (std::size_t done = 0; done < n;) {
    const ssize_t got = Once(transfer, pid, here + done, there + done, n - done);
    if (got <= 0) {
      const int err = errno;
      if (got < 0 && err == EFAULT) return err;
      throw Fault(err == ESRCH ? FaultKind::kPeerGone : FaultKind::kSystem, peer,
                  std::string(what) + ": " + std::strerror(err));
    }
    done += static_cast<std::size_t>(got);
  }
  return 0;
}

// Says, for as long as it lives, that this process may be writing into the receiver's.
class Writing {
 public:
  explicit Writing(std::atomic<std::uint32_t>& flag) : flag_(flag) { flag_.store(1, std::memory_order_seq_cst); }
  ~Writing() { flag_.store(0, std::memory_order_release); }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

 private:
  std::atomic<std::uint32_t>& flag_;
};

}  // namespace

bool PrivateMemory::Try() const {
  const pid_t pid = owner_.pid.load(std::memory_order_acquire);
  std::uint64_t found = ~owner_.token;
  return pid > 0 && Once(process_vm_readv, pid, &found, owner_.token_at, sizeof found) == sizeof found &&
         found == owner_.token;
}

void PrivateMemory::Read(std::byte* dst, std::uint64_t address, std::size_t n) const {
  if (All(process_vm_readv, owner_, peer_, dst, address, n, "reading the sender's memory") == 0) return;
  throw Fault(FaultKind::kSystem, peer_,
              "the sender's memory cannot be read by other processes any more; HETCOLL_SHM_READ=never does without");
}

bool PrivateMemory::Write(std::uint64_t address, const std::byte* src, std::size_t n) const {
  auto* from = const_cast<std::byte*>(src);  // as iovec wants it; it is only read
  return All(process_vm_writev, owner_, peer_, from, address, n, "writing the receiver's memory") == 0;
}

void PrivateMemory::CheckValid() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read came before
  if (owner_.withdrawn.load(std::memory_order_relaxed) == 0) return;
  throw Fault(FaultKind::kPeerGone, peer_, "the sender failed while its memory was read");
}

void SharedCopy::Open(std::uint64_t fragment, std::byte* into) {
  pieces_.into.store(reinterpret_cast<std::uintptr_t>(into), std::memory_order_relaxed);
  pieces_.next.store(fragment << kPieceBits, std::memory_order_release);
}

bool SharedCopy::Take(std::uint64_t fragment, std::size_t nbytes, Piece& piece) {
  std::uint64_t next = pieces_.next.load(std::memory_order_acquire);
  do {
    piece.at = (next & ((1u << kPieceBits) - 1)) * PieceBytes(nbytes);
    if (next >> kPieceBits != fragment || piece.at >= nbytes) return false;
  } while (!pieces_.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  piece.n = std::min(PieceBytes(nbytes), nbytes - piece.at);
  return true;
}

bool SharedCopy::Write(std::uint64_t fragment, const std::byte* data, std::size_t nbytes, const ShmOwner& receiver,
                       int peer) {
  const Writing writing(pieces_.writing);
  if (receiver.withdrawn.load(std::memory_order_seq_cst) != 0) return false;
  const PrivateMemory memory(receiver, peer);
  bool any = false;
  for (Piece piece{}; Take(fragment, nbytes, piece); any = true) {
    // The receiver waits for a piece that was taken, so `into` is this fragment's until it was written.
    if (!memory.Write(pieces_.into.load(std::memory_order_relaxed) + piece.at, data + piece.at, piece.n)) {
      pieces_.returned.store(piece.at / PieceBytes(nbytes) + 1, std::memory_order_release);
      return gave_back_ = true;
    }
    pieces_.written.fetch_add(1, std::memory_order_release);
  }
  return any;
}

bool SharedCopy::TakeBack(std::size_t nbytes, Piece& piece) {
  const std::uint64_t returned = pieces_.returned.load(std::memory_order_acquire);
  if (returned == 0) return false;
  pieces_.returned.store(0, std::memory_order_relaxed);
  piece.at = (returned - 1) * PieceBytes(nbytes);
  piece.n = std::min(PieceBytes(nbytes), nbytes - piece.at);
  return true;
}

void CopyingSenders::Add(const ShmPieces& pieces, const ShmOwner& sender) {
  std::lock_guard lock(mutex_);
  senders_.emplace_back(&pieces, &sender);
}

void CopyingSenders::Settle() {
  constexpr std::int64_t kMostNs = 1'000'000'000;
  std::lock_guard lock(mutex_);
  const std::int64_t start = NowNs();
  for (const auto& [pieces, sender] : senders_) {
    while (pieces->writing.load(std::memory_order_seq_cst) != 0 && NowNs() - start < kMostNs) {
      const bool alive = PrivateMemory(*sender, -1).Try();
      // A process that ends has threads that are in the kernel for a moment longer.
      std::this_thread::sleep_for(alive ? std::chrono::microseconds(20) : std::chrono::milliseconds(2));
      if (!alive) break;
    }
  }
}

}  // namespace hetcoll
