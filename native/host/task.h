// One run of a bound plan over actual memory.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/flight_recorder.h"
#include "kernels/codecs.h"
#include "kernels/kernels.h"
#include "plan/plan.h"
#include "transport/shm/shm.h"
#include "transport/transport.h"

namespace hetcoll {

// One direction of a link to a peer. `doorbell` is the peer's, where it may sleep on shared memory.
template <class End>
struct Port {
  std::unique_ptr<End> end;
  ShmDoorbell* doorbell = nullptr;
  bool keeps = false;         // its end may lend what it can also copy: SendEnd::Keep
  bool touched = false;       // since doorbells were last looked at
  std::uint64_t taken = 0;    // bytes that went through this end so far
  std::uint64_t through = 0;  // messages that went through it to their end
  std::uint32_t tickets = 0;  // point to point: steps that were given a turn
  std::uint32_t serving = 0;  // point to point: the turn that may move

  // Whether a message that has begun is not through; with one of the other direction it is an exchange.
  bool waits() const { return tickets != serving; }
};

// What the engine's transports offer a task, and what it reports back: which ports it touched.
struct Links {
  explicit Links(int size)
      : send(static_cast<std::size_t>(size) * kLinkChannels), recv(static_cast<std::size_t>(size) * kLinkChannels) {}

  Port<SendEnd>& tx(int peer, int channel) { return send[Index(peer, channel)]; }
  Port<RecvEnd>& rx(int peer, int channel) { return recv[Index(peer, channel)]; }

  std::vector<Port<SendEnd>> send;
  std::vector<Port<RecvEnd>> recv;
  struct Touched {
    ShmDoorbell* doorbell;
    bool* flag;  // the port's `touched`
  };
  std::vector<Touched> touched;  // whose doorbells to look at before waiting

  template <class End>
  void Touch(Port<End>& port) {
    if (port.touched || port.doorbell == nullptr) return;
    port.touched = true;
    touched.push_back({port.doorbell, &port.touched});
  }

 private:
  static std::size_t Index(int peer, int channel) {
    return static_cast<std::size_t>(peer) * kLinkChannels + static_cast<std::size_t>(channel);
  }
};

class Task;

// A bound plan with everything that every call of this shape shares. It finds its own shared_ptr, so that the binding
// layer hands out that one: a pointer made from the Python object would need the interpreter's lock to die, on threads
// that must not wait for it.
struct Shape : std::enable_shared_from_this<Shape> {
  Shape(BoundPlan plan, DType type, const Kernels* table, const Codec* coder, unsigned ranks, std::uint64_t hash,
        bool point, int number)
      : bound(std::move(plan)),
        dtype(type),
        kernels(table),
        codec(coder),
        divisor(ranks),
        descriptor(hash),
        p2p(point),
        id(number) {}

  BoundPlan bound;
  DType dtype;
  const Kernels* kernels;    // null when the plan reduces nothing
  const Codec* codec;        // null when the plan has no compressed edges
  unsigned divisor;          // for kScale
  std::uint64_t descriptor;  // hash of what all ranks must agree on
  bool p2p;
  int id;
  std::shared_ptr<Task> spare = nullptr;  // reused by calls that do not overlap
};

// What somebody may wait for.
struct Pending {
  enum class State : int { kRunning, kDone, kFailed };
  std::atomic<State> state{State::kRunning};
  int refused = 0;  // failed, but the engine has not: see Refusal
};

class Task : public Pending {
 public:
  explicit Task(const Shape& shape);

  // A fresh run over this memory. `residual`: of what is rounded, or null: what is lost is forgotten. Point to point:
  // also takes its turn on each port, in the order of the calls.
  void Prepare(Links& links, const void* send, void* recv, std::uint64_t signature, float* residual = nullptr);
  void SetScratch(std::byte* scratch) { base_[static_cast<std::size_t>(Buf::kScratch)] = scratch; }

  // Moves whatever can move without waiting; true if anything did. Throws Fault.
  bool Pass(Links& links);

  bool finished() const { return lanes_left_ == 0; }
  // It is over: from here on its memory is the user's.
  void End(State how);
  std::size_t scratch_bytes() const { return bound_.scratch_bytes; }
  bool staged() const { return bound_.staged; }
  std::size_t bytes() const { return std::max(bound_.send_bytes, bound_.recv_bytes); }
  bool p2p() const { return p2p_; }
  int shape_id() const { return shape_id_; }
  bool begun = false;                // it has its scratch
  FlightRecorder::Mark mark;         // of the call
  std::shared_ptr<Shape> keepalive;  // while it is queued
  std::byte* snapshot = nullptr;     // of a queued one: where its result is copied once it is there, or null

  // The steps that wait at the heads of lanes, and sends that go ahead of them: for sleeping, for departed peers and
  // for messages to people.
  template <class Fn>
  void ForEachBlocked(Fn&& fn) const {
    for (std::size_t lane = 0; lane + 1 < bound_.lane_begin.size(); ++lane) {
      if (heads_[lane] == bound_.lane_begin[lane + 1]) continue;
      fn(steps_[bound_.order[heads_[lane]]]);
      if (const std::uint32_t at = Ahead(lane, heads_[lane]); at > 0) fn(steps_[bound_.order[at]]);
    }
  }
  // Whether nothing but its peer keeps this step from moving.
  bool Ready(const BoundStep& s) const {
    std::size_t limit = s.len;
    return Limit(s, limit);
  }
  std::string Describe() const;

 private:
  bool AdvanceLane(Links& links, std::size_t lane);
  bool Move(Links& links, std::uint32_t index, std::size_t limit);
  bool MoveSend(Links& links, BoundStep& s, std::size_t limit);
  bool Post(Links& links, BoundStep& s, std::size_t limit);
  std::uint32_t Ahead(std::size_t lane, std::uint32_t at) const;
  bool PostAhead(Links& links, std::size_t lane);
  bool MoveRecv(Links& links, BoundStep& s, std::size_t limit);
  bool MoveRecvReduce(Links& links, BoundStep& s, std::uint32_t index, std::size_t limit);
  bool MoveLocal(BoundStep& s, std::size_t limit);
  bool TakeBack(Links& links);
  bool WaitsForLent(const BoundStep& s) const;
  bool SendCodes(Links& links, BoundStep& s, std::size_t limit);
  bool RecvCodes(Links& links, BoundStep& s, std::size_t limit);
  void ReduceCodes(std::byte* dst, const std::byte* src, const std::byte* codes, std::size_t count);
  std::byte* FuseSlot(Links& links, const BoundStep& s, std::uint32_t index, const std::byte* from, std::size_t n,
                      bool& its_turn);
  bool MayPost(std::uint32_t target, bool& its_turn) const;
  // How far a step may go given its deps; false when it must not move at all.
  bool Limit(const BoundStep& s, std::size_t& limit) const;
  bool Apart() const;  // SEND and RECV are different memory
  // Whether what it stores goes around the cache: not where lines are there already, as those of summands in place are.
  bool Streams(const BoundStep& s) const { return s.stream_stores && (bound_.use != Use::kSummed || Apart()); }
  Message MessageOf(const BoundStep& s) const {
    return {signature_ + s.number, s.len, bound_.may_lend || apart_, s.back, bound_.use, s.mutual, s.gives};
  }
  Message CodesOf(const BoundStep& s) const { return {signature_ + s.number, s.wire, bound_.may_lend || apart_}; }
  std::byte* Codes(const BoundStep& s) const { return base_[static_cast<std::size_t>(Buf::kScratch)] + s.codes; }
  std::byte* Src(const BoundStep& s) const { return base_[static_cast<std::size_t>(s.src_buf)] + s.src_off; }
  std::byte* Dst(const BoundStep& s) const { return base_[static_cast<std::size_t>(s.dst_buf)] + s.dst_off; }

  const BoundPlan& bound_;  // the shape's, as are the next six
  const Kernels* kernels_;
  const Codec* codec_;
  unsigned divisor_;
  bool p2p_;
  int shape_id_;
  std::size_t item_;
  std::vector<BoundStep> steps_;
  std::vector<std::uint32_t> tickets_;  // of each step's port; point to point only
  std::array<std::uint32_t, kMaxLanes> heads_{};
  std::array<std::byte*, 3> base_{};
  float* residual_ = nullptr;
  std::size_t lanes_left_ = 0;
  std::uint64_t signature_ = 0;
  bool apart_ = false;
  bool lends_ = false;  // to a link that could copy it: TakeBack
};

}  // namespace hetcoll
