// How a sleeping rank is woken: a datagram socket in the abstract namespace, beside its TCP sockets in one poll(2).
//
// A futex would be a little cheaper, but a rank may wait for shared memory and TCP at once, and poll knows no futexes.
//
// Each takes a random name, and tells it in shared memory: another user of this host, who sees what names there are
// (/proc/net/unix), cannot take one before it is bound.
#pragma once

#include <cstdint>

namespace hetcoll {

class Doorbell {
 public:
  Doorbell();
  ~Doorbell() { Close(); }
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  int fd() const { return fd_; }
  std::uint64_t name() const { return name_; }
  void Ring() const { Ring(name_); }
  void Ring(std::uint64_t name) const;  // never waits; a full queue means that the sleeper is being woken already
  bool Drain() const;                   // whether it was rung
  void Close();

 private:
  std::uint64_t name_;
  int fd_;
};

}  // namespace hetcoll
