#include "transport/verbs/control_socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/crc32c.h"

namespace hetcoll {

ControlSocket::ControlSocket(std::span<const int> fds, const SocketId& first, std::shared_ptr<TcpShared> shared)
    : peer_(first.peer), shared_(std::move(shared)), sockets_(MakeSockets(fds, first, shared_)) {}

Parts ControlSocket::Checked(const void* record, std::size_t n) {
  Parts parts{nullptr, 0, static_cast<const std::byte*>(record), n};
  if (!checks()) return parts;
  check_ = Crc32c(0, record, n);
  parts.tail = reinterpret_cast<const std::byte*>(&check_);
  parts.tail_size = sizeof check_;
  return parts;
}

// Of the payload the frame says whether it has a checksum.
void ControlSocket::SendFrame(const Frame& frame, const std::byte* payload) {
  const Word word{kFrameWord, 0, frame.seq};
  std::byte head[sizeof word + sizeof frame + 2 * sizeof check_];
  const Parts first = Checked(&word, sizeof word);
  first.CopyTo(head);
  const Parts second = Checked(&frame, sizeof frame);
  second.CopyTo(head + first.size());
  sockets_->Queue(kFirst, {head, first.size() + second.size(), payload, frame.nbytes});
}

bool ControlSocket::Flush() {
  sockets_->Flush(kFirst);
  return !sockets_->queued(kFirst);
}

bool ControlSocket::Delivered() { return ended_ || (Flush() && sockets_->Undelivered(kFirst) == 0); }

bool ControlSocket::ReceiveBytes(std::byte* to, std::size_t n, std::size_t& have) {
  while (have < n && !ended_) {
    try {
      const ssize_t got = sockets_->Receive(kFirst, nullptr, 0, to + have, n - have);
      if (got < 0 && errno == EAGAIN) return false;
      if (got < 0 && errno != EINTR) sockets_->Lost(kFirst, "receive");  // what had come can be had all the same
      ended_ = got == 0;
      have += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
    } catch (const Fault& fault) {
      if (fault.kind != FaultKind::kPeerGone) throw;
      ended_ = true;
      why_ = fault.what();
    }
  }
  return have == n;
}

// Never reads beyond the record: what follows may be for the TCP ends.
bool ControlSocket::Fill(std::size_t n) {
  const std::size_t size = n + (checks() ? sizeof check_ : 0);
  std::size_t have = in_.size();
  in_.resize(size);
  const bool whole = ReceiveBytes(in_.data(), size, have);
  in_.resize(have);
  if (!whole || !checks()) return whole;
  std::uint32_t check = 0;
  std::memcpy(&check, in_.data() + n, sizeof check);
  if (check == Crc32c(0, in_.data(), n)) {
    NoteRight();
    return true;
  }
  in_.clear();
  AskAgain(size, "a record");
  return false;
}

void ControlSocket::NoteRight() {
  if (std::exchange(again_, false)) shared_->counts.resent += 1;
}

void ControlSocket::AskAgain(std::size_t n, const std::string& what) {
  shared_->counts.spoiled += 1;
  const std::string why = "what rank " + std::to_string(peer_) +
                          " sent over TCP beside RDMA was spoiled on the way: " + what +
                          " came with a wrong checksum (CRC32C)";
  const bool too_many = spoils_.Add(NowNs());
  if (too_many || !sockets_->mends()) {
    throw Fault(FaultKind::kCorrupt, peer_, "verbs: " + why + (too_many ? spoils_.Times() : ""));
  }
  again_ = true;
  sockets_->AskAgain(kFirst, n, {}, why);
}

void ControlSocket::Count(Holdings& held) const {
  if (sockets_ != nullptr) sockets_->Count(held);
}

void ControlSocket::AddPoll(std::vector<pollfd>& fds) const {
  if (ended_ || sockets_ == nullptr || sockets_->down(kFirst)) return;
  fds.push_back({sockets_->fd(kFirst), static_cast<short>(sockets_->queued(kFirst) ? POLLIN | POLLOUT : POLLIN), 0});
}

void ControlSocket::Shutdown() const { sockets_->Shutdown(); }

void ControlSocket::Close() const { sockets_->Close(); }

std::shared_ptr<Sockets> ControlSocket::Release() { return std::exchange(sockets_, nullptr); }

}  // namespace hetcoll
