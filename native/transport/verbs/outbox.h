// The sending half of a link: which rail carries what, and what may have to be sent again.
//
// Frames are numbered along the link and kept until the peer has consumed them: copied ones in the staging memory of
// the rail that carried them last, lent ones where the user has them. When a rail dies, what it carried and the peer
// did not confirm goes again on the others, or over the control socket where there are none. Neither end uses a dead
// rail's ring any more, so a late write into it does no harm, and the receiver drops what it has already.
//
// While no rail is alive, new frames go over the control socket as well, so many at a time as the peer is sure to have
// room for. The receiver has one order for all, so a rail may take over again between any two frames.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/bounce_buffer.h"
#include "transport/verbs/control_socket.h"
#include "transport/verbs/rail.h"

namespace hetcoll {

inline constexpr std::size_t kInviteBytes = std::size_t{64} << 10;  // shorter messages are not worth a clear-to-send
inline constexpr std::size_t kClearToSends = 16;                    // that a link's ends keep
inline constexpr std::uint64_t kWindow = std::uint64_t{kRailDepth} * kMaxRails;  // frames between the ends of a link

// A receiver's: this message may be written straight to its destination.
struct ClearToSend {
  std::uint64_t signature = 0;
  std::uint64_t total = 0;
  std::uint64_t address = 0;          // of the message's first byte
  std::uint64_t number = UINT64_MAX;  // of the clear-to-send on this link
  std::uint64_t taken = 0;            // frames that the receiver was done with, whether or not that was confirmed
  std::uint32_t rkeys[kMaxRails] = {};
};
static_assert(sizeof(ClearToSend) == 72);

using Rails = std::vector<std::unique_ptr<Rail>>;

class Outbox {
 public:
  // `bounce`: all memory, here and there, is a GPU's. Then rails take messages that are invited, as every one is, and
  // the processor touches none of them. Over the control socket they go through that buffer. Else null.
  Outbox(const Rails& rails, ControlSocket& control_socket, Regions& regions, std::size_t ring_bytes, int peer,
         BounceBuffer* bounce, Integrity integrity);
  ~Outbox();

  // As SendEnd's. kWouldBlock: no rail has room.
  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n);
  // The same over the control socket, once all rails are lost and what they carried has gone again: that has room for
  // few frames, and the peer takes the oldest first.
  std::ptrdiff_t PushOverTcp(const Message& m, std::size_t at, const std::byte* data, std::size_t n);
  std::byte* Reserve(const std::byte* data, std::size_t n);
  void Commit(const Message& m, std::size_t at, std::size_t n);
  std::size_t Lent();
  void Answered(std::uint64_t messages);
  // Copies what is lent, and will go again: no rail is alive. A device does that later, and until then it is lent.
  void Keep();
  // Whether it does, and will not tell of the end.
  bool copying() const { return !copies_.empty(); }

  void Delivered(std::uint64_t seq);
  void Invited(const ClearToSend& clear_to_send);

  // What this rail carried has to go again.
  void Lost(const Rail& rail);
  // Where the peer's memory is a GPU's, what is sent again is written there again: nothing new may come before that is
  // over, or it would be overwritten.
  bool resending() const { return lost_ > 0 || oldest_ < recovered_; }
  // Sends again what rails have room for, or the control socket.
  void Resend(bool over_tcp);

  // The peer has everything before `seq`.
  void DeliveredBefore(std::uint64_t seq);
  // Whether something that this dead rail carried still waits to go again.
  bool Uses(const Rail& rail) const;

  // Whether the peer is not known to be done with everything that went over the control socket.
  bool waits_for_tcp() const { return over_tcp_ > 0; }

  std::uint32_t nics() const { return nics_; }
  std::uint64_t next() const { return next_; }

  struct Counters {
    std::uint64_t lent_bytes = 0;
    std::uint64_t copied_bytes = 0;
    std::uint64_t tcp_bytes = 0;  // over the control socket
    std::uint64_t resent = 0;     // frames, on other rails or over TCP
    std::uint64_t full = 0;       // times that no rail had room
    std::uint64_t clear_to_sends = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  struct Sent {
    const Frame* frame;
    const std::byte* payload;
    Region* region;         // where the payload is the user's
    std::uint64_t before;   // bytes that were pushed before it
    std::size_t at;         // in its message
    std::uint64_t message;  // its number
    std::uint8_t rail;      // or kOverTcp
    bool delivered;
    bool lost;
    bool again;  // sent more than once
    std::shared_ptr<std::byte[]> kept = nullptr;
  };
  struct Copy {  // of a frame that is lost, out of a device's memory
    std::uint64_t mark;
    std::uint64_t seq;
    std::shared_ptr<std::byte[]> to;
  };

  static constexpr std::uint8_t kOverTcp = kMaxRails;

  Sent& At(std::uint64_t seq) { return sent_[seq % kWindow]; }
  const Sent& At(std::uint64_t seq) const { return sent_[seq % kWindow]; }
  const ClearToSend* Wanted(const Message& m) const;
  Rail* Pick(std::size_t n, Frame*& frame);
  bool TcpHasRoom() const;
  bool Check(Frame& frame, const std::byte* payload, const Region* region);
  void SendOverTcp(Frame frame, const std::byte* payload);
  bool ResendOverTcp(Sent& sent);
  void Keep(Sent& sent, std::uint64_t seq);
  static void HasKept(Sent& sent);
  static bool IsCopied(const Sent& sent) { return sent.kept != nullptr && sent.region != nullptr; }
  void PollCopies();
  void Send(Rail& rail, Frame* frame, const std::byte* payload, Region* region, const Message& m, std::size_t at,
            std::size_t n);

  const Rails& rails_;
  ControlSocket& control_socket_;
  Regions& regions_;
  int peer_;
  BounceBuffer* bounce_;
  bool device_;
  bool checks_;
  FrameSample sample_;
  std::uint32_t nics_ = 0;  // bit mask of those that the rails use
  std::size_t fragment_;
  std::array<Sent, kWindow> sent_;
  std::vector<Frame> kept_;  // of a GPU, those to go again: a lost rail's memory is needed for the one to come
  std::deque<Copy> copies_;
  std::uint64_t oldest_ = 0;  // not delivered
  std::uint64_t next_ = 0;
  std::size_t lost_ = 0;
  std::size_t over_tcp_ = 0;  // frames, not delivered
  std::uint64_t resend_from_ = 0;
  std::uint64_t recovered_ = 0;  // once all frames before it are delivered
  std::uint64_t taken_ = 0;      // frames of a GPU that the peer was done with, as it said in its clear-to-sends
  std::uint64_t messages_ = 0;   // pushed to their end
  std::uint64_t pushed_ = 0;     // bytes
  std::uint64_t lent_seq_ = 0;
  // The last ones: most are used at once, or too late. Of a GPU, each has the place of its number.
  std::array<ClearToSend, kClearToSends> clear_to_sends_;
  Rail* reserved_rail_ = nullptr;
  Frame* reserved_ = nullptr;
  Counters counters_;
};

}  // namespace hetcoll
