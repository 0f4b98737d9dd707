// The sockets of one TCP link, and what a call sends or receives on one of them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hetcoll {

struct Holdings;

// Adds a connected socket, and the most that the kernel keeps in it: its buffers grow up to that by themselves.
void CountSocket(int fd, Holdings& held);

// What one call sends: a header, data, and the data's checksum, each of which may be nothing.
struct Parts {
  const std::byte* header;
  std::size_t head;
  const std::byte* data;
  std::size_t n;
  const std::byte* tail = nullptr;
  std::size_t tail_size = 0;

  std::size_t size() const { return head + n + tail_size; }
  void CopyTo(std::byte* to) const;
};

class Sockets {
 public:
  // `spoil`: the byte of all that is sent, from 1 on, of which a bit is turned; 0: none.
  Sockets(std::span<const int> fds, int peer, std::uint64_t spoil);
  ~Sockets() { Close(); }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  std::uint32_t count() const { return static_cast<std::uint32_t>(fds_.size()); }
  int fd(std::uint32_t stripe) const { return fds_[stripe]; }
  int peer() const { return peer_; }

  ssize_t Send(std::uint32_t stripe, const Parts& parts);
  ssize_t Receive(std::uint32_t stripe, std::byte* header, std::size_t head, std::byte* data, std::size_t n) const;

  void Count(Holdings& held) const;
  void Close() const;
  void Shutdown() const;

  // Which stripe to use after `stripe`, which is about to carry `nbytes`: each in turn, and for large blocks the one
  // with the least to do, so that a slow network gets less.
  std::uint32_t After(std::uint32_t stripe, std::size_t nbytes) const;

  [[noreturn]] void Fail(const char* what) const;

 private:
  ssize_t SendSpoiled(std::uint32_t stripe, const Parts& parts);
  std::size_t Queued(std::uint32_t stripe) const;

  std::vector<int> fds_;
  int peer_;
  std::uint64_t spoil_;
};

}  // namespace hetcoll
