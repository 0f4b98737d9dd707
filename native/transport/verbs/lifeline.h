// The TCP connection beside a link's rails: it carries the handshake, ends when the peer does, and takes over when the
// last rail has died.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace hetcoll {

class Lifeline {
 public:
  // Takes over the descriptors and makes them non-blocking. Records use the first.
  Lifeline(std::span<const int> fds, int peer);
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  template <class Record>
  void Send(const Record& record) {
    SendBytes(&record, sizeof record);
  }
  // False until all of it is here.
  template <class Record>
  bool Receive(Record& record) {
    if (!Fill(sizeof record)) return false;
    std::memcpy(&record, in_.data(), sizeof record);
    in_.clear();
    return true;
  }
  void SendBytes(const void* data, std::size_t n);
  std::unique_ptr<std::byte[]> ReceiveBlock(std::size_t n);  // null until all of it is here
  bool Flush();                                              // whether all that was sent is on its way
  bool ended() const { return ended_; }

  void AddPoll(std::vector<pollfd>& fds) const;
  void Shutdown() const;
  std::vector<int> Release();  // the descriptors; nothing may be left to flush

 private:
  bool Fill(std::size_t n);

  std::vector<int> fds_;
  int peer_;
  std::vector<std::byte> out_;
  std::size_t out_at_ = 0;  // what was sent of it
  std::vector<std::byte> in_;
  bool ended_ = false;
};

}  // namespace hetcoll
