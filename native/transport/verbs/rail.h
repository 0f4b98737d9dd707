// One queue pair of a link: a reliable connection between a port here and a port of the peer's, with a ring of memory
// at each end that the other end writes.
//
// A frame (header and payload) is one RDMA write with immediate into the peer's ring. The immediate says where it lies
// and bears the low bits of its number, so that nothing is ever inferred from payload, which may hold any bytes, and
// a frame that comes twice, or not at all, is seen. The receiver grants room with further writes: empty ones, whose
// immediate is the count of frames that it is done with. At most kDepth frames, and so at most kDepth grants, are on
// their way in each direction, and the receive queue has a place for all of them.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/verbs/frame.h"
#include "transport/verbs/nic.h"

namespace hetcoll {

inline constexpr std::uint32_t kRailDepth = 64;
// Frames are counted from here on: every link passes the place where the 30 bits of a grant start over.
inline constexpr std::uint64_t kFirstFrame = (std::uint64_t{1} << 30) - 100;
inline constexpr std::size_t kLeastRing = std::size_t{8} << 10;
inline constexpr std::size_t kLargestRing = std::size_t{256} << 20;

// What the peer must know of an end.
struct RailAddress {
  std::uint64_t ring;
  std::uint32_t rkey;
  std::uint32_t qpn;
  std::uint32_t psn;
  std::uint32_t mtu;
  std::uint8_t gid[16];
  std::uint16_t lid;
  std::uint8_t ethernet;
  std::uint8_t usable;  // 0: this end could not make it
  std::uint32_t pad;
};
static_assert(sizeof(RailAddress) == 48);

struct RailMemory {
  std::byte* ring;
  std::byte* staging;  // mirrors the peer's ring
  std::size_t ring_bytes;
};

class Rail;
struct BringUpError;

// Where payload may be written instead of into the ring.
struct Target {
  std::uint64_t address;
  std::uint32_t rkey;
};

// What a rail reports while it is polled.
class RailListener {
 public:
  virtual ~RailListener() = default;
  virtual void OnFrame(Rail& rail, std::uint64_t index, const Frame& frame, const std::byte* payload) = 0;
  // Whether this frame came before, whichever way.
  virtual bool Has(const Frame& frame) const = 0;
  // What came has a wrong checksum: of the header, or of that frame's payload. The rail must not go on.
  virtual void OnSpoiled(Rail& rail, const Frame* frame) = 0;
  virtual void OnDelivered(std::uint64_t seq) = 0;  // the peer is done with this frame
  // The peer found this rail dead, that was in use for the `life`th time.
  virtual void OnLost(int rail, std::uint32_t life) = 0;
};

class Rail {
 public:
  // Where the queue pair cannot be made, the rail is born dead.
  // `checks`: frames bear checksums, and those that do not fit theirs are reported.
  Rail(Nic& nic, const RailMemory& memory, int number, int peer, std::string peer_device, bool checks);
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  RailAddress address() const;
  void Connect(const RailAddress& remote);

  int number() const { return number_; }
  Nic& nic() const { return nic_; }
  const std::string& peer_device() const { return peer_device_; }
  bool alive() const { return error_.empty(); }
  const std::string& error() const { return error_; }
  std::string Name() const;
  // No more of it in either direction.
  void Kill(const std::string& why);
  // Has the device forget it: from here on nothing touches its memory, not even a late write.
  void GiveBack();

  // ---- Sending ----

  // The place for a frame with n bytes of payload, which may be written behind it; null when there is no room. Post
  // takes the one given last.
  Frame* Slot(std::size_t n);
  // `payload` may lie behind the frame, or wherever `lkey` allows the NIC to read. It goes behind the frame in the
  // peer's ring, or to the target.
  void Post(Frame* frame, const std::byte* payload, std::uint32_t lkey, const Target* target = nullptr);
  // A frame that is no part of the stream.
  void PostControl(std::uint32_t flags);
  void PostLost(int rail, std::uint32_t life);
  // An empty message, to go before and behind the first frame: where packets are too large for the network, the one
  // before it gets through alone.
  void PostEmpty() { PostImmediate(kEmpty, 0, true); }
  // What is wrong where nothing else got through, in either direction; else nothing.
  std::string OnlyEmptyThrough() const;
  // Whether the device has confirmed all that it was given, as far as is known.
  bool confirmed() const { return sq_done_ == sq_posted_; }
  bool Drained();  // whether the peer's NIC has everything; asks for an answer where none is due
  void PollSend();
  std::uint32_t staging_lkey() const { return staging_mr_->lkey; }
  // Whether this lies where its frames are copied to.
  bool Stages(const void* at) const {
    const auto* byte = static_cast<const std::byte*>(at);
    return byte >= memory_.staging && byte < memory_.staging + memory_.ring_bytes;
  }
  std::size_t queued() const { return bytes_posted_ - bytes_done_; }
  double bytes_per_ns() const { return bytes_per_ns_; }
  // What may be hoped for: what was slow a while ago may be so no more, and only who is given something can show it.
  double hoped_bytes_per_ns(std::int64_t now) const;
  bool measured() const { return measured_; }

  // ---- Receiving ----

  // Frame `index` is consumed; `at_once` if the sender waits for that.
  void Release(std::uint64_t index, bool at_once);
  // Tells the sender of all that is consumed.
  void Grant();

  // ---- Both ----

  void Poll(RailListener& listener) {
    if (!alive()) return;
    PollRecv(listener);
    if (Busy()) PollSend();
  }
  // Called several times a second: kills a rail on which nothing is completed for longer than a queue pair may try by
  // itself. Devices have been seen to forget about what they were asked to send.
  void Watch(std::int64_t now);
  // Has the NIC's channel announce what comes next.
  void Arm();

  struct Counters {
    std::uint64_t frames = 0;
    std::uint64_t bytes = 0;
    std::uint64_t received = 0;
    std::uint64_t credits = 0;
    std::uint64_t signalled = 0;
    std::uint64_t inlined = 0;
    std::uint64_t direct_bytes = 0;

    Counters& operator+=(const Counters& more);
  };
  const Counters& counters() const { return counters_; }
  // It takes the place of this one.
  void Follow(const Rail& old) { counters_ += old.counters_; }

 private:
  enum Kind : std::uint32_t { kData = 0, kCredit = 1, kLost = 2, kEmpty = 3 };
  static constexpr std::uint32_t kSendDepth = 4 * kRailDepth;
  static constexpr std::uint32_t kRecvDepth = 4 * kRailDepth;
  static constexpr std::uint32_t kRepost = 16;

  struct Flight {
    std::uint64_t seq;
    std::uint64_t end;  // of the ring's use
  };

  void Make();
  void MakeQueues();
  void Check(const BringUpError& bad) const;
  void PostRecvs();
  void PollRecv(RailListener& listener);
  void Receive(std::uint32_t imm, RailListener& listener);
  void Credit(std::uint32_t bits, RailListener& listener);
  void PostImmediate(Kind kind, std::uint32_t bits, bool signalled);
  void PostSend(ibv::SendWr& wr, bool signalled, ibv::SendWr* before = nullptr);
  bool Busy() const { return sq_signalled_ > sq_done_; }
  void Measure();
  [[noreturn]] void Corrupt(const char* what) const;
  void Failed(const ibv::Wc& wc, const char* doing);

  Nic& nic_;
  const RailMemory memory_;
  int number_;
  int peer_;
  std::string peer_device_;
  bool checks_;
  bool armed_ = false;
  std::string error_;
  std::uint32_t psn_;
  std::uint32_t inline_bytes_ = 0;
  RailAddress remote_{};
  VerbsOwned<ibv::Mr> ring_mr_;
  VerbsOwned<ibv::Mr> staging_mr_;
  VerbsOwned<ibv::Cq> send_cq_;
  VerbsOwned<ibv::Cq> recv_cq_;
  VerbsOwned<ibv::Qp> qp_;
  std::array<ibv::RecvWr, kRepost> recv_wrs_{};

  // Sending.
  std::uint64_t posted_ = kFirstFrame;    // frames
  std::uint64_t credited_ = kFirstFrame;  // frames that the peer is done with
  std::uint64_t place_ = 0;               // of the slot given last
  std::uint64_t pos_ = 0;                 // the ring is used up to here
  std::uint64_t freed_ = 0;               // and free again up to here
  std::array<Flight, kRailDepth> flights_;
  std::uint64_t sq_posted_ = 0;  // requests
  std::uint64_t sq_signalled_ = 0;
  std::uint64_t sq_done_ = 0;
  std::uint64_t bytes_posted_ = 0;
  std::uint64_t bytes_signalled_ = 0;
  std::uint64_t bytes_done_ = 0;
  std::array<std::uint64_t, kSendDepth> sent_before_;  // bytes, by signalled request
  std::int64_t busy_since_ns_ = 0;                     // 0: it has been idle since
  std::uint64_t busy_bytes_ = 0;                       // bytes_done_ then
  double bytes_per_ns_;
  bool measured_ = false;
  std::int64_t measured_ns_ = 0;
  std::uint64_t watched_done_ = 0;  // sq_done_ when it moved last
  std::int64_t watched_ns_ = 0;
  std::int64_t quiet_ns_ = 0;  // since then, as far as somebody was watching

  // Receiving.
  bool empty_came_ = false;
  std::uint64_t arrived_ = kFirstFrame;   // frames
  std::uint64_t consumed_ = kFirstFrame;  // frames, without a gap
  std::uint64_t granted_ = kFirstFrame;   // frames that the sender was told of
  std::size_t ungranted_bytes_ = 0;
  bool grant_due_ = false;  // there was no room in the send queue
  std::bitset<kRailDepth> released_;
  std::array<std::uint32_t, kRailDepth> sizes_;
  std::uint32_t spent_recvs_ = 0;

  Counters counters_;
};

}  // namespace hetcoll
