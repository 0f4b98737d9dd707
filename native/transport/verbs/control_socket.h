// The TCP connection beside a link's rails: it carries the handshake, ends when the peer does, and carries the frames
// while no rail is left. Where it is reset between two ranks that live it is made again as any (tcp_mending.h), and the
// stream goes on where it was. Where the link checks anything, every record has a checksum (CRC32C), and what is
// spoiled comes again over another connection.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/integrity.h"
#include "transport/tcp.h"
#include "transport/tcp_sockets.h"
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
  // Takes over the descriptors, of which records use the first.
  ControlSocket(std::span<const int> fds, const SocketId& first, std::shared_ptr<TcpShared> shared);

  template <class Record>
  void Send(const Record& record) {
    sockets_->Queue(kFirst, Checked(&record, sizeof record));
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
  // What came last, a record or payload, is right.
  void NoteRight();
  // The last n bytes that came are spoiled: they come again. Throws where that is of no use.
  void AskAgain(std::size_t n, const std::string& what);
  bool Flush();      // whether all that was sent is on its way
  bool Delivered();  // whether the peer's system has all of it
  bool ended() const { return ended_; }
  const std::string& why() const { return why_; }  // it ended

  void AddPoll(std::vector<pollfd>& fds) const;
  void Count(Holdings& held) const;
  void Shutdown() const;
  void Close() const;
  std::shared_ptr<Sockets> Release();  // nothing may be left to flush

 private:
  static constexpr std::uint32_t kFirst = 0;  // of the sockets

  bool checks() const { return shared_->integrity != Integrity::kOff; }
  Parts Checked(const void* record, std::size_t n);
  bool Fill(std::size_t n);

  int peer_;
  std::shared_ptr<TcpShared> shared_;
  std::shared_ptr<Sockets> sockets_;
  std::vector<std::byte> in_;
  std::uint32_t check_ = 0;  // of what is sent
  bool again_ = false;       // what was spoiled last has yet to come right
  Spoils spoils_;
  bool ended_ = false;
  std::string why_ = "the peer closed the connection";
};

}  // namespace hetcoll
