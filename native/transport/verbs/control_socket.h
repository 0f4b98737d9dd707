// The TCP connection beside a link's rails: it carries the handshake, ends when the peer does, and carries the frames
// while no rail is left.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/frame.h"

namespace hetcoll {

// What ends say to each other there.
struct Word {
  std::uint32_t kind;
  std::uint32_t mask;
  std::uint64_t seq;
};
enum WordKind : std::uint32_t {
  kReadyWord = 1,     // rails that could be connected
  kVerifiedWord = 2,  // rails that brought the probe
  kFrameWord = 3,     // a Frame and its payload follow
  kTakenWord = 4,     // of frames that came here, the first that is not used up
  kRailWord = 5,      // a rail's number and attempt; a RailAddress follows
  kLostWord = 6,      // a rail's number and life: it is lost
};

class ControlSocket {
 public:
  // Takes over the descriptors and makes them non-blocking. Records use the first.
  ControlSocket(std::span<const int> fds, int peer);
  ~ControlSocket();
  ControlSocket(const ControlSocket&) = delete;
  ControlSocket& operator=(const ControlSocket&) = delete;

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
  void SendFrame(const Frame& frame, const std::byte* payload);
  // Receives what is missing of n bytes, of which `have` are there. Whether all are.
  bool ReceiveBytes(std::byte* to, std::size_t n, std::size_t& have);
  bool Flush();      // whether all that was sent is on its way
  bool Delivered();  // whether the peer's system has all of it
  bool ended() const { return ended_; }

  void AddPoll(std::vector<pollfd>& fds) const;
  void Count(Holdings& held) const;
  void Shutdown() const;
  std::vector<int> Release();  // the descriptors; nothing may be left to flush

 private:
  void SendBytes(const void* data, std::size_t n, int flags = 0);
  std::size_t Write(const std::byte* data, std::size_t n, int flags);
  bool Fill(std::size_t n);

  std::vector<int> fds_;
  int peer_;
  std::vector<std::byte> out_;
  std::size_t out_at_ = 0;  // what was sent of it
  std::vector<std::byte> in_;
  bool ended_ = false;
};

}  // namespace hetcoll
