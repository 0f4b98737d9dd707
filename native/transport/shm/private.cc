#include "transport/shm/private.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace hetcoll {
namespace {

ssize_t ReadOnce(pid_t pid, void* here, std::uint64_t there, std::size_t n) {
  iovec local{here, n};
  iovec remote{reinterpret_cast<void*>(there), n};  // NOLINT: another process's
  return process_vm_readv(pid, &local, 1, &remote, 1, 0);
}

}  // namespace

bool PrivateMemory::Try() const {
  const pid_t pid = owner_.pid.load(std::memory_order_acquire);
  std::uint64_t found = ~owner_.token;
  return pid > 0 && ReadOnce(pid, &found, owner_.token_at, sizeof found) == sizeof found && found == owner_.token;
}

void PrivateMemory::Read(std::byte* dst, std::uint64_t address, std::size_t n) const {
  const pid_t pid = owner_.pid.load(std::memory_order_relaxed);
  for (std::size_t done = 0; done < n;) {
    const ssize_t got = ReadOnce(pid, dst + done, address + done, n - done);
    if (got > 0) {
      done += static_cast<std::size_t>(got);
      continue;
    }
    const int err = errno;
    if (got < 0 && err == EFAULT && !Try()) {
      throw Fault(FaultKind::kPeerGone, peer_, "the sender's memory is gone: its process is another program now");
    }
    if (got < 0 && err == EFAULT) {
      throw Fault(
          FaultKind::kSystem, peer_,
          "the sender's memory cannot be read by other processes any more; HETCOLL_SHM_READ=never does without");
    }
    throw Fault(err == ESRCH ? FaultKind::kPeerGone : FaultKind::kSystem, peer_,
                std::string("reading the sender's memory: ") + std::strerror(err));
  }
}

void PrivateMemory::CheckValid() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read came before
  if (owner_.withdrawn.load(std::memory_order_relaxed) == 0) return;
  throw Fault(FaultKind::kPeerGone, peer_, "the sender failed while its memory was read");
}

}  // namespace hetcoll
