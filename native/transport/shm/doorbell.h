// How a sleeping rank is woken: a datagram socket in the abstract namespace, beside its TCP sockets in one poll(2).
//
// A futex would be a little cheaper, but a rank may wait for shared memory and TCP at once, and poll knows no futexes.
#pragma once

#include <string>

namespace hetcoll {

class Doorbell {
 public:
  // `prefix` is the job's random name; the socket is "\0prefix-index".
  Doorbell(const std::string& prefix, int index);
  ~Doorbell() { Close(); }
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  int fd() const { return fd_; }
  void Ring(int index) const;  // never waits; a full queue means that the sleeper is being woken already
  bool Drain() const;          // whether it was rung
  void Close();

 private:
  std::string prefix_;
  int fd_;
};

}  // namespace hetcoll
