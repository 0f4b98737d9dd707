// What a fuzzer gives a harness, read as a list of choices. Behind its end every choice is the first one, so an empty
// script is what a correct peer does, and needs no corpus.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

namespace hetcoll::fuzz {

class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

  bool ended() const { return left_.empty(); }

  template <class T>
  T Take() {
    T value{};
    const std::size_t n = std::min(sizeof value, left_.size());
    if (n > 0) std::memcpy(&value, left_.data(), n);
    left_ = left_.subspan(n);
    return value;
  }
  std::size_t Below(std::size_t n) { return n == 0 ? 0 : (n > 256 ? Take<std::uint32_t>() : Take<std::uint8_t>()) % n; }
  bool Flip() { return Below(2) == 1; }

  // A number of a header: one of those that matter, or any.
  std::uint64_t Number(std::uint64_t size) {
    const std::uint8_t choice = Take<std::uint8_t>();
    const std::array<std::uint64_t, 8> known = {0, 1, 2, size, size - 1, size / 2, ~std::uint64_t{0}, size + 1};
    return choice < known.size() ? known[choice] : choice < 16 ? Take<std::uint64_t>() : choice;
  }

  // Changes some of the bytes; whether any.
  bool Edit(std::span<std::byte> bytes) {
    const std::size_t edits = bytes.empty() ? 0 : Below(4);
    for (std::size_t i = 0; i < edits; ++i) {
      const std::size_t at = Below(bytes.size()), n = std::min(bytes.size() - at, std::size_t{1} << Below(4));
      const std::uint64_t value = Number(bytes.size());
      std::memcpy(bytes.data() + at, &value, n);
    }
    return edits > 0;
  }

 private:
  std::span<const std::uint8_t> left_;
};

// What must hold whatever comes.
inline void Hold(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

inline std::array<int, 2> SocketPair() {
  std::array<int, 2> fds{};
  Hold(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds.data()) == 0, "no sockets");
  return fds;
}

// The network between the ends of a connection, which owns both descriptors: it changes what goes from one to the
// other, if it is told to, and drops nothing that it has taken.
class Wire {
 public:
  Wire(int from, int to) : from_(from), to_(to) {}
  ~Wire() {
    close(from_);
    close(to_);
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Up to n bytes; whether any went, as `change` left them.
  template <class Change>
  bool Forward(std::size_t n, Change&& change) {
    const auto memory = std::make_unique_for_overwrite<std::byte[]>(n);
    const ssize_t got = recv(from_, memory.get(), n, MSG_PEEK | MSG_DONTWAIT);
    if (got <= 0) return false;
    const std::span bytes(memory.get(), static_cast<std::size_t>(got));
    change(bytes);
    const ssize_t sent = send(to_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent > 0 && recv(from_, bytes.data(), static_cast<std::size_t>(sent), MSG_DONTWAIT) == sent;
  }
  bool Back(std::size_t n) {
    std::swap(from_, to_);
    const bool went = Forward(n, [](auto) {});
    std::swap(from_, to_);
    return went;
  }
  void Insert(std::span<const std::byte> bytes) const {
    static_cast<void>(send(to_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  void End() const { shutdown(to_, SHUT_WR); }

 private:
  int from_;
  int to_;
};

}  // namespace hetcoll::fuzz
