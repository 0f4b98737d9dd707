// One link over verbs: its rails, its control socket, and what happens to it from the handshake to the last rail's
// death.
//
//   kHello -> kConnect -> kProbe -> kUp, or else kSwitch -> kTcp
//
// Each end sends a Hello with the addresses of its queue pairs, connects them, says which it could (Ready), sends a
// probe over those that both could, and says which of them brought the peer's probe whole (Verified). A rail is used
// when both ends verified it. Where none is, the link is a plain TCP link from the start. Whoever finds a rail dead
// tells the other end over those that are left, or over the control socket after the last (Lost). From then on until a
// rail is back (recovery.cc) the control socket carries the frames (Frame), and the receiver confirms them (Taken).
// Where the memory is a GPU's its copier brings them to host memory and back. Such a link begins with a rail, or fails.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/ready.h"
#include "transport/tcp.h"
#include "transport/transport.h"
#include "transport/verbs/bounce_buffer.h"
#include "transport/verbs/control_socket.h"
#include "transport/verbs/inbox.h"
#include "transport/verbs/outbox.h"
#include "transport/verbs/rail.h"
#include "transport/verbs/recovery.h"

namespace hetcoll {

// What the links of an engine share.
struct VerbsShared {
  Regions regions;
  std::shared_ptr<TcpShared> tcp;
  ReadyFd ready;
  std::vector<std::string> events;  // for the log: what was lost, and how it went on
  std::atomic<bool>& has_events;
};

struct VerbsLinkOptions {
  int rank;
  int peer;
  int channel;
  std::size_t ring_bytes;                    // of each rail, in each direction: a power of two
  std::int64_t recovery_ns = 1'000'000'000;  // from the loss of a rail until it is tried again for the first time
  // Where all memory that is sent from and to is a GPU's, which no processor touches: what copies it to `pinned` and
  // back while there is no rail.
  std::shared_ptr<Copier> copier = nullptr;
  std::span<std::byte> pinned = {};

  bool device() const { return copier != nullptr; }
};

inline constexpr std::uint64_t kConfirmEvery = 8;  // frames over TCP
inline constexpr double kProbeSeconds = 10;  // more than a queue pair tries by itself, unless it was told to be patient

class VerbsLink final : private RailListener {
 public:
  enum class State : int { kHello, kConnect, kProbe, kUp, kSwitch, kTcp };

  // Rails are pairs of a NIC and the name of the peer's device.
  VerbsLink(const VerbsLinkOptions& options, std::span<const std::pair<Nic*, std::string>> rails,
            std::span<const int> fds, VerbsShared& shared);

  // Does whatever can be done without waiting. Throws Fault; then again whenever it is called.
  void Drive();
  // The same, and looks at the control socket. For the engine's keeper, while nobody may be using the link.
  // Whether anything changed.
  bool Service();
  void AddWatch(std::vector<pollfd>& fds) const;
  // Descriptors to sleep on. Whoever sleeps is woken when something arrives.
  void AddPoll(std::vector<pollfd>& fds);
  // Adds the control socket, or the link over TCP in its place, and the rings of all rails.
  void Count(Holdings& held) const;

  // Whether messages go through the outbox: not while the link is being made or mended.
  bool open() const { return state_ == State::kUp && !outbox_.resending() && !control_socket_.ended(); }
  bool over_tcp() const { return state_ == State::kTcp || (state_ == State::kUp && Alive() == 0); }
  SendEnd* tcp_send() const { return tcp_.send.get(); }  // null but for plain TCP links
  RecvEnd* tcp_recv() const { return tcp_.recv.get(); }
  // The receiver is about to take bytes [at, at + n) of a message to dst.
  void Expect(const Message& m, std::size_t at, std::byte* dst, std::size_t n) {
    if (m.revocable || m.into != nullptr || m.total < kInviteBytes) return;
    if (invited_.empty() && m.signature != expected_) Invite(m, at, dst, n);
  }
  // The receiver will take all of this message to dst, after those announced before.
  void Announce(const Message& m, std::byte* dst) {
    if (options_.device() || m.total >= kInviteBytes) Invite(m, 0, dst, m.total);
  }
  void Taken(const Message& m, std::size_t end) {
    if (end == m.total && !invited_.empty() && invited_.front().what.signature == m.signature) Uninvite();
  }
  // As RecvEnd's and SendEnd's.
  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
    return AllBuried() ? outbox_.PushOverTcp(m, at, data, n) : outbox_.Push(m, at, data, n);
  }
  Placement Expose(std::byte* base, std::size_t n);
  void Hide(bool at_once);
  void Recall();
  // Whether the frame that is due, which is here, is also where the GPU sees it, if it is to be there.
  bool Landed();
  // Sees to it that these bytes of that frame, which are here, are at dst: how many are; kWouldBlock, ask again.
  std::ptrdiff_t Place(std::byte* dst, const View& bytes, bool stream);
  // From here on no NIC touches the users' memory, and nothing works any more.
  void Fence();

  // Called when a frame is used up. What came over TCP the peer is told of, now and then or `at_once`. A rail that
  // brings little grants nothing by itself, and the peer keeps no more than a window behind the oldest frame.
  void Confirm(bool at_once = false) {
    if (inbox_.due() >= granted_ + kWindow / 4) GrantRest();
    if (confirmed_ < inbox_.tcp_end() && inbox_.due() >= confirmed_ + (at_once ? 1 : kConfirmEvery)) SendTaken();
  }

  Outbox& outbox() { return outbox_; }
  Inbox& inbox() { return inbox_; }
  // Whether the peer has left and nothing of its is on the way.
  [[noreturn]] void PeerGone() const;
  bool ended() const { return control_socket_.ended(); }

  // Whether the peer's NICs, or its TCP, have all that was sent. Asks them first where no answer is due.
  bool Drained();
  // Whether nothing is under way by itself: no handshake, no recovery, nothing that the network owes an answer for.
  bool Settled() const;
  void Shutdown();
  void Abandon() const;  // SendEnd's

  State state() const { return state_; }
  const VerbsLinkOptions& options() const { return options_; }
  const Rails& rails() const { return rails_; }
  const std::vector<Recovery>& recoveries() const { return recoveries_; }  // of each rail
  int lost_rails() const { return lost_rails_; }                           // ever
  bool lacks_rails() const { return lost_ != 0; }                          // now
  std::uint64_t copied_bytes() const { return copied_bytes_; }             // of what came, to where it was to be

 private:
  struct Hello {
    std::uint32_t magic;
    std::uint32_t rails;
    std::uint64_t ring_bytes;
    RailAddress addresses[kMaxRails];
  };
  struct Incoming {  // a frame over TCP
    Frame frame;
    std::unique_ptr<std::byte[]> payload;
    std::size_t have;
  };

  void OnFrame(Rail& rail, std::uint64_t index, const Frame& frame, const std::byte* payload) override;
  bool Has(const Frame& frame) const override { return inbox_.Has(frame.seq); }
  void OnSpoiled(Rail& rail, const Frame* frame) override;
  void OnDelivered(std::uint64_t seq) override;
  void OnLost(int rail, std::uint32_t life) override;

  void DriveOnce();
  bool ReceiveWord(WordKind kind, Word& word);
  void CheckWord(WordKind kind, const Word& word) const;
  // handshake.cc
  void SendHello();
  void TakeHello();
  static std::string NothingCame(const Rail& rail, const std::string& to);
  void SendProbe(Rail& rail);
  void TakeProbe(Rail& rail, const Frame& frame, const std::byte* payload);
  void Probe();
  void FinishProbe(std::uint32_t mask);
  // recovery.cc
  bool leads() const { return options_.rank < options_.peer; }
  bool IsLost(const Rail& rail) const { return (lost_ & 1u << rail.number()) != 0; }
  bool IsDown(const Rail& rail) const { return (buried_ & 1u << rail.number()) != 0; }
  void Recover(std::int64_t now);
  void Lead(Rail& lost, Recovery& r, std::int64_t now);
  void Follow(Rail& lost, Recovery& r);
  void Make(Recovery& r, int number, bool connect);
  void Failed(Recovery& r, int number, const std::string& why, std::int64_t now);
  void WaitForTry(Recovery& r, std::int64_t now) const;
  void AwaitRecovery(const Rail& rail);
  void SendOffer(int number, std::uint32_t attempt, const RailAddress& address);
  bool TakeOffer();
  void TakeUp(Rail& rail);

  // clear-to-sends.cc
  void Invite(const Message& m, std::size_t at, std::byte* dst, std::size_t n);
  void Uninvite();
  void PostClearToSends();
  bool PostClearToSend(ClearToSend& clear_to_send);
  const Region* Lands() const;

  void NoteRight(const Frame& frame) const;
  bool checks() const { return shared_.tcp->integrity != Integrity::kOff; }
  void PollRails();
  void Bury(Rail& rail);
  void ReadWords();
  void TakeWord(const Word& word);
  bool TakeFrame();
  void SendTaken();
  void GrantRest();
  void GoOverTcp();
  void KillRails(std::uint32_t mask, const std::string& why);
  std::uint32_t Alive() const;
  bool AllBuried() const { return buried_ == (1u << rails_.size()) - 1; }
  RailMemory MemoryOf(std::size_t rail) const;
  Rails MakeRails(std::span<const std::pair<Nic*, std::string>> peers) const;
  void Tell(const std::string& event);

  VerbsLinkOptions options_;
  VerbsShared& shared_;
  State state_ = State::kHello;
  ControlSocket control_socket_;
  std::shared_ptr<std::byte> memory_;  // of each rail: its ring, then its staging
  Rails rails_;
  std::unique_ptr<BounceBuffer> bounce_;  // where the memory is a GPU's
  Outbox outbox_;
  Inbox inbox_;
  LinkEnds tcp_;
  struct Invited {  // a message that the peer may write
    ClearToSend what;
    Region* region;
    const std::byte* base;
  };
  std::uint64_t expected_ = 0;  // signature of the last message for which a clear-to-send was thought of
  std::deque<Invited> invited_;
  std::size_t unposted_ = 0;  // of these, the last ones, that were not sent
  std::uint64_t clear_to_sends_ = 0;
  std::deque<Region*> exposed_;
  int exposed_devices_ = 0;  // of these, memory of GPUs
  bool revoked_ = false;     // the peer may think that it may write there: no rail is to come back
  std::uint64_t copied_bytes_ = 0;
  bool landing_ = false;  // a NIC reads what it wrote
  Hello peer_hello_{};
  std::uint32_t verified_ = 0;          // rails that brought the peer's probe
  std::optional<std::uint32_t> told_;   // of them, as the peer was told
  std::optional<std::uint32_t> heard_;  // what the peer said of them
  std::int64_t probe_until_ = 0;
  std::vector<Recovery> recoveries_;  // of each rail
  std::optional<Word> rail_word_;     // its address is to follow
  bool in_frame_ = false;             // a frame's word was read
  std::optional<Incoming> incoming_;  // until its payload is here
  std::uint64_t granted_ = 0;         // all frames before this, if rails brought them
  std::uint64_t confirmed_ = 0;       // the peer was told that frames before this are used up
  std::uint32_t buried_ = 0;          // all that are down
  std::uint32_t lost_ = 0;            // of those, what was in use
  int lost_rails_ = 0;
  Spoils spoils_;
  bool leaving_ = false;    // nothing more is sent over the control socket
  std::uint64_t news_ = 0;  // grows with whatever a sleeper would want to know
  std::optional<Fault> fault_;
};

}  // namespace hetcoll
