// Plans as the engine sees them: decoded from src/hetcoll/plan/ir.py's records, then bound to byte counts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "base/message.h"
#include "base/types.h"
#include "kernels/codecs.h"

namespace hetcoll {

enum class Op : std::uint8_t {
  kSend = 0,
  kRecv = 1,
  kRecvReduce = 2,
  kCopy = 3,
  kReduce = 4,
  kScale = 5,
  kLocal = 6,
  kRound = 7
};
enum class Buf : std::int8_t { kNone = -1, kSend = 0, kRecv = 1, kScratch = 2 };
inline constexpr int kMaxLanes = 32;

// The records of plan/ir.py, little-endian.
struct PlanHeader {
  std::uint32_t magic;
  std::uint16_t lanes;
  std::uint16_t collective;
  std::uint32_t steps;
  std::uint32_t deps;
  std::uint32_t send_units;
  std::uint32_t recv_units;
  std::uint32_t scratch_copies;
  std::uint8_t scratch_like;
  std::uint8_t flags;     // kApart, kStaged, kRedundant
  std::uint16_t credits;  // 0: the plan completes even when every send waits for its receive
  std::uint32_t parts;    // of local steps, all together
  std::uint32_t place;    // in place: the unit of the larger of SEND and RECV at which the smaller one begins
};
static_assert(sizeof(PlanHeader) == 40);
// Out of place, the plan needs no credits, nor deps that are only for calls in place.
inline constexpr std::uint8_t kApart = 1;
// SCRATCH is to be where the other ranks of the host can read it.
inline constexpr std::uint8_t kStaged = 2;
// Several ranks reduce the same elements, each for itself.
inline constexpr std::uint8_t kRedundant = 4;
inline constexpr std::uint16_t kPointToPoint = 9;  // a `collective`; the others are those of types.h
inline constexpr std::uint32_t kPlanMagic = 0x48435033;

struct SpanRecord {
  std::int32_t buf;
  std::int32_t start;
  std::int32_t count;
};

static_assert(sizeof(SpanRecord) == 12);

struct StepRecord {
  std::uint8_t op;
  std::uint8_t lane;
  std::uint8_t channel;     // local steps: which collective
  std::uint8_t compressed;  // the message is in the codes of the call's format
  std::int32_t peer;        // local steps: the root's place in the island, or -1
  SpanRecord src;
  SpanRecord dst;
  std::uint32_t dep_begin;
  std::uint32_t dep_count;
  std::uint32_t part_begin;
  std::uint32_t part_count;
};
static_assert(sizeof(StepRecord) == 48);

struct PlanError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where each unit begins: the C++ half of `cut` in plan/ir.py.
std::size_t CutOffset(std::size_t count, std::uint32_t units, std::uint32_t unit);

// A decoded plan. Immutable after construction.
struct Plan {
  explicit Plan(std::span<const std::byte> encoded, int size);  // throws PlanError

  PlanHeader head{};
  std::vector<StepRecord> steps;
  std::vector<std::uint32_t> deps;
  std::vector<SpanRecord> parts;
  int size;  // ranks

  std::size_t nbytes() const;  // of memory

 private:
  void CheckLocal(const StepRecord& step, std::size_t index) const;
};

// One step with its bytes: what a plan becomes for given counts. `done` and `complete` are the state of a run.
struct BoundStep {
  Op op;
  Buf src_buf = Buf::kNone;
  Buf dst_buf = Buf::kNone;
  bool stream_stores = false;  // nobody but step `fuse` reads dst again soon, and the message exceeds the cache
  bool complete = false;
  std::uint16_t channel = 0;
  std::int32_t peer = -1;
  std::int32_t fuse = -1;  // a kRecvReduce's result is what step `fuse` sends
  bool mutual = false;     // a send: the plan also receives from this peer on this channel
  bool gives = false;      // a send from common memory: nothing else reads what it sends
  bool block = false;      // it moves by whole blocks of codes: a compressed message, or rounding for one
  std::int16_t back = -1;  // of a send: the channel on which its answer may come in its place (see MarkAnswers)
  std::uint32_t dep_begin = 0;
  std::uint32_t dep_end = 0;
  std::uint64_t number = 0;  // of its message on this FIFO, in kNumberSteps; point to point: set by each run
  std::size_t src_off = 0;
  std::size_t dst_off = 0;
  std::size_t len = 0;
  std::size_t done = 0;     // bytes that others may rely on: received, or sent and free to be written again
  std::size_t posted = 0;   // sends: bytes handed to the transport
  std::uint64_t until = 0;  // sends: the last of these, among all that the transport took
  // Compressed messages: their bytes on the wire, those of them that were encoded or have come, and where in scratch.
  // Rounding: `codes` is which of the call's residuals are its own.
  std::size_t wire = 0;
  std::size_t coded = 0;
  std::size_t codes = 0;
};

// A dep whose step touches the very same span: the dependent may follow it element by element.
struct BoundDep {
  std::uint32_t step;
  bool follows;
  bool in_place_only = false;  // and this dep can be dropped where SEND and RECV are different memory
};

// What a local step has for each member of the island, with its bytes; nothing where `buf` is kNone.
struct BoundPart {
  Buf buf;
  std::size_t off;
  std::size_t len;
};

// A local step: a collective among the members of this rank's island. `Local` in plan/ir.py says who has what.
struct BoundLocal {
  std::uint32_t step;
  Collective kind;
  std::int32_t root;  // place in the island, or -1
  std::vector<BoundPart> parts;
};

struct BoundPlan {
  // `send_table` and `recv_table` are element offsets of units (units + 1 entries); empty means the even cut. With
  // `skip_empty`, as on GPUs, what is empty is no message. `codec` is for plans with compressed edges.
  BoundPlan(const Plan& plan, DType dtype, std::size_t send_count, std::size_t recv_count,
            std::span<const std::size_t> send_table, std::span<const std::size_t> recv_table, bool skip_empty = false,
            const Codec* codec = nullptr);

  std::vector<BoundStep> steps;
  std::vector<BoundDep> deps;
  std::vector<std::uint32_t> order;       // step indices, lane by lane
  std::vector<std::uint32_t> lane_begin;  // lanes + 1 entries into `order`
  std::vector<BoundLocal> locals;         // in the order of their steps
  bool may_lend = false;                  // sends may wait for their receives
  bool staged = false;                    // as its flag
  bool apart = false;                     // with different memory they may in any case, without some deps
  Use use = Use::kLone;                   // of its messages
  std::size_t scratch_bytes = 0;
  std::size_t send_bytes = 0;
  std::size_t recv_bytes = 0;
  std::size_t residuals = 0;          // elements that are rounded
  std::size_t compressed_before = 0;  // bytes of the compressed messages that are sent, and on the wire
  std::size_t compressed_after = 0;
  bool may_alias = true;     // SEND and RECV may be the same memory: then the smaller is a part of the larger
  std::size_t part_off = 0;  // ... which begins there

  std::size_t nbytes() const;  // of memory

 private:
  void Compress(BoundStep& step, std::size_t items, const Codec& codec);
  // The passes (passes.cc), in this order: each may use what those before it found out.
  void NumberMessages(const Plan& plan);
  void BindDeps(const Plan& plan);
  void OrderLanes(const Plan& plan);
  void MarkReaders(const Plan& plan, bool large);
  void MarkAnswers(const Plan& plan);
  void MarkMutual(const Plan& plan);
  void MarkGiven();
  void PackScratch();
};

}  // namespace hetcoll
