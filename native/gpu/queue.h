// Runs plans on a GPU by enqueuing them: copies, reductions and signals on streams, in an order computed beforehand.
//
// Between GPUs of one host a message goes through a slot of host memory that both drivers have mapped, or of the
// receiver's GPU that the sender's has mapped, which then is `near`. The sender's copy engine fills the slot and the
// stream then writes the slot's `ready` word; the receiver's stream waits for that word, empties the slot and writes
// its `credit` word. No processor takes part. Words are numbers of messages on the edge, which only grow.
//
// Where this GPU has mapped what a peer sends, nothing goes through a slot: this rank pulls it out of there. Then
// `ready` says that it may be read, and `credit` that it was.
//
// A plan is compiled once for its counts into a list of actions: which stream does what, and which events order them
// where they touch the same memory. The order of the steps is a linear extension of the order in which all ranks'
// steps depend on each other (plan/order.py), so that the list makes progress even on a device that runs all
// streams of the process one action after another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "gpu/driver.h"
#include "gpu/lanes.h"
#include "gpu/vendor.h"
#include "plan/plan.h"
#include "proxy/proxy.h"
#include "transport/shm/slots.h"

namespace hetcoll {

// One direction of the way between this rank and a peer. All addresses are the device's. Where `proxy` is set, the
// slots are this process's own, at one address for the host as well, and the proxy carries what is in them.
struct SlotEdge {
  Slots slots;
  std::shared_ptr<ProxyEdge> proxy = nullptr;
  bool near = false;
  std::uint64_t messages = 0;
  std::uint64_t call = 0;              // the last one that used it, and
  std::uint64_t begun = 0;             // the messages before that
  std::optional<Event> last = {};      // the end of the last EnqueueAlone, and
  DeviceStream last_stream = nullptr;  // where that was
};

struct DeviceKernel {
  DeviceFunction function = nullptr;
  unsigned block = 1;
  unsigned most_blocks = 1;
  unsigned per_block = 1;  // bytes of one operand
};

enum class DeviceStep : std::uint8_t {
  kWaitEvent,   // until `event` of another stream
  kRecord,      // `event`
  kWaitCredit,  // until the edge's next slot is empty
  kWaitReady,   // until it is full
  kCopy,        // src -> dst
  kCopyOut,     // src -> the next slot
  kCopyIn,      // the next slot -> dst
  kPull,        // the peer's memory -> dst
  kPublish,     // the slot is full: on to the next one
  kGrant,       // the slot is empty: on to the next one
  kReduce,      // dst = src (+) other
  kReduceIn,    // dst = src (+) the next slot
  kScale,       // dst = dst / divisor
  kRound,       // dst = src as a compressed edge carries it; `other` is what was lost, in residuals
  kEncode,      // dst = src as codes
  kDecode,      // dst = what the codes in src stand for
  kDecodeAdd,   // dst = src + what the codes in `other` stand for
  kLocal,       // a collective of the island: `edge` is its number in the program
  kMessages,    // small messages of the call: `edge` is the number of their kernel in the shape
};

// From kMessages on: the messages of a group, each of which has a buffer of its own.
enum class Area : std::int16_t { kSend = 0, kRecv = 1, kScratch = 2, kStaging = 3, kResidual = 4, kMessages = 5 };

struct Place {
  Area area = Area::kSend;
  std::size_t offset = 0;

  std::size_t message() const { return static_cast<std::size_t>(area) - static_cast<std::size_t>(Area::kMessages); }
};

// Where the areas are; without residuals there is none.
struct Bases {
  std::byte* At(const Place& p) const {
    return (p.area < Area::kMessages ? areas[static_cast<std::size_t>(p.area)] : messages[p.message()]) + p.offset;
  }

  std::array<std::byte*, static_cast<std::size_t>(Area::kMessages)> areas;
  std::span<std::byte* const> messages;
};

struct DeviceAction {
  DeviceStep step;
  std::uint8_t stream;
  std::uint16_t edge = 0;
  std::uint32_t event = 0;
  Place dst{};
  Place src{};
  Place other{};
  std::size_t n = 0;
  std::uint32_t level = 0;          // of its step: order.py
  const std::byte* peer = nullptr;  // of a kPull, where this GPU sees it

  bool Waits() const {  // for a peer
    return step == DeviceStep::kWaitCredit || step == DeviceStep::kWaitReady || step == DeviceStep::kLocal ||
           step == DeviceStep::kMessages;
  }
  bool Tells() const {  // a peer
    return step == DeviceStep::kPublish || step == DeviceStep::kGrant || step == DeviceStep::kLocal ||
           step == DeviceStep::kMessages;
  }
};

inline constexpr unsigned kStagedMessages = 2 * kCopyLanes;  // that have come and wait for their reduction

// Who says that a slot is full, or empty.
enum class Signals : std::uint8_t {
  // The stream of signals says both, in the order of the steps, so what has not come holds up what is to go. In
  // collectives inside a host that costs nothing, as sends are ahead of receives by some messages; and each stream that
  // waits delays what the others have waited for.
  kTogether,
  // It says that slots are full, and whoever has emptied one says so itself, where what comes may be long in coming:
  // from another host, and in all-to-alls. So it is in graphs, whose calls took 1.13 to 1.18 times as long by kApart.
  kFull,
  // Whoever has emptied or filled one says so itself, and one stream fills all, so that no other copy is begun before
  // the signal. So it is with messages, which stand ready long before they are due, as the host is ahead of the GPU. A
  // signal that stands ready on a stream of its own delays the user's kernels, by 1.1 to 1.9 us each on H200s, which
  // cost a pipeline 2 to 3 %. On a stream of a copy engine's it does not, but waits there for the copies of the other
  // direction.
  kApart,
};

// A part of a local step; nothing where n is 0.
struct LocalPart {
  Place at{};
  std::size_t n = 0;
};

struct LocalAction {
  Collective kind;
  int root;
  LocalPart src;
  LocalPart dst;
  std::vector<LocalPart> parts;
  bool even;  // the parts are equally long and adjacent
};

// What this rank pulls out of a peer's memory, in one copy to `offset` of RECV.
struct Pull {
  std::uint16_t edge;
  std::size_t offset;
  const std::byte* peer;
  std::size_t n;
};

// Of this rank's own data, from SEND to RECV.
struct OwnPart {
  std::size_t src;
  std::size_t dst;
  std::size_t n;
};

// Where a kernel of small messages comes among the steps of a plan: before those from this place in their order on.
struct MessagesPlace {
  std::uint32_t before;
  std::uint32_t level;
};

struct DeviceProgram {
  // `order` names each step of the plan once, by rising `levels` where they have any; `near`: those of the edges
  // that are; `kernels` of small messages come at rising places. Throws PlanError where a message is larger than a
  // slot.
  DeviceProgram(const BoundPlan& plan, std::span<const std::uint32_t> order, std::span<const std::uint16_t> edges,
                std::size_t slot_bytes, Signals signals, const std::set<std::uint16_t>& near = {},
                std::span<const std::uint32_t> levels = {}, std::span<const MessagesPlace> kernels = {});

  // Of pulls alone; the peers at the other ends of `readers` pull out of this rank's memory. It lasts until they have.
  // `aside`: what comes waits in the scratch until then, since SEND and RECV are the same memory.
  DeviceProgram(std::span<const std::uint16_t> readers, std::span<const Pull> pulls, const std::optional<OwnPart>& own,
                bool aside);

  // What lies in SEND and RECV are messages, which begin at these bytes: each has an area of its own from now on.
  void Part(std::span<const std::size_t> sends, std::span<const std::size_t> recvs);

  bool by_copies() const { return !all_local && !all_small; }

  std::vector<DeviceAction> actions;
  std::vector<LocalAction> locals;
  std::array<bool, kDeviceLanes> used{};
  bool all_local = true;          // nothing but local steps: they can run on the user's own stream
  bool all_small = false;         // nothing but small messages: so can those
  bool alone = false;             // nothing but messages of one edge: likewise
  bool pulls = false;             // nothing but pulls
  std::set<std::uint16_t> edges;  // that it uses
  std::set<std::uint16_t> near;   // of those
  std::uint32_t events = 0;
  std::size_t scratch_bytes = 0;
};

// From what a program is made that can be captured: its steps come by their levels, and what waits for a peer comes
// `lag` levels after what this rank tells its peers (order.py).
struct CaptureRecipe {
  DeviceProgram Program(std::size_t slot_bytes) const;

  BoundPlan plan;
  std::vector<std::uint16_t> edges;
  std::vector<std::uint32_t> levels;
  std::uint32_t lag;
  std::vector<std::size_t> sends;  // see DeviceProgram::Part
  std::vector<std::size_t> recvs;
  std::vector<MessagesPlace> kernels = {};  // whose places are those in the order of steps that is not captured
  std::set<std::uint16_t> near = {};
};

// How the vendor's library sees a reduction: islands/native.py.
struct LocalReduction {
  int dtype = 0;
  int op = 0;
  unsigned elements = 1;  // of its that make one of ours
};

// Kernels for compressed edges.
struct DeviceCodec {
  DeviceKernel round;
  DeviceKernel encode;
  DeviceKernel decode;
  DeviceKernel add;
};

// Small messages of a call, one each way with every other rank at most, in one kernel. Its argument
// (devices/kernels/arguments.h) begins with the messages, each of which begins with the address of its buffer.
inline constexpr std::size_t kMessageStride = 48;
struct MessagesKernel {
  DeviceFunction function;
  std::vector<std::byte> arguments;
  std::vector<std::byte> captured;  // those of captured calls: as long
  unsigned blocks;
  unsigned threads;
  std::vector<Place> places;         // of the buffers
  std::vector<std::uint16_t> rings;  // whose ends they use: kernels that share one come one after another
  std::shared_ptr<Event> end;        // of its last launch
};

struct DeviceShape {
  DeviceProgram program;
  DeviceKernel reduce;
  DeviceKernel scale;
  std::size_t item;
  unsigned divisor;
  LocalReduction local{};
  bool p2p = false;  // messages are numbered along the edge, not within the call
  DeviceCodec codec{};
  std::shared_ptr<const CaptureRecipe> recipe = nullptr;
  std::vector<MessagesKernel> messages = {};
  bool by_library = false;  // one library carries all of the call, on all ranks
};

// A collective in one kernel. Its only argument is a struct (devices/kernels/arguments.h) that begins with the
// addresses of the two buffers, dst and src, which each call fills in.
struct KernelShape {
  DeviceFunction function;
  std::vector<std::byte> arguments;
  std::vector<std::byte> captured;  // those of captured calls: as long
  unsigned blocks;
  unsigned threads;
};

class DeviceCapture;

class DeviceQueue {
 public:
  // `priority` is the lanes'; `staging` is device memory for the staged messages, of a slot each.
  DeviceQueue(std::shared_ptr<Driver> driver, int priority, std::byte* staging, std::size_t slot_bytes);
  ~DeviceQueue();

  // The communicator of this rank's island, where it has one.
  void SetIsland(std::unique_ptr<VendorCollectives> island, int place, int members);

  // Slots of `slot_bytes`, at least as many as the order of the steps counts on. Returns the edge's number.
  std::uint16_t AddEdge(SlotEdge edge);

  // A program of these steps, see DeviceProgram; kTogether becomes kFull where a message goes to another host or comes
  // from there.
  DeviceProgram Compile(const BoundPlan& plan, std::span<const std::uint32_t> order,
                        std::span<const std::uint16_t> edges, Signals signals,
                        std::span<const MessagesPlace> kernels = {}) const;

  // What programs of copies need to be captured; before the first of them is.
  void SetCapture(std::unique_ptr<DeviceCapture> capture);
  // Destroys the lanes' streams. Nothing may be under way, and nothing is enqueued any more.
  void DropLanes() {
    const Current current(*driver_);
    lanes_.Drop();
  }
  DeviceCapture* capture() const { return capture_.get(); }

  // Enqueues one run over this device memory. It begins after what is on `user` now, and whatever comes on `user` later
  // begins after it where `join` says so. Messages of one edge, joined, come one after another and wait for nothing
  // else; other calls come one after another. `signature` is the call's, for what travels between hosts. `capturing`,
  // as Capturing said: it becomes a part of the graph that is captured on `user`, joined and after what was captured
  // there before; who launches the graph keeps it apart from other calls. `residual`: the call's, in float32, or null.
  void Enqueue(const DeviceShape& shape, const std::byte* send, std::byte* recv, std::byte* scratch,
               std::uint64_t signature, DeviceStream user, bool join, bool capturing = false,
               std::byte* residual = nullptr);

  // The same for a group of messages, of which each has a buffer and a signature: first all sends, then all receives.
  void EnqueueGroup(const DeviceShape& shape, std::span<std::byte* const> buffers,
                    std::span<const std::uint64_t> signatures, DeviceStream user, bool join, bool capturing);

  // A kernel on the user's own stream. Calls on different streams come one after another: they share their state.
  void EnqueueKernel(const KernelShape& shape, const std::byte* send, std::byte* recv, DeviceStream user,
                     bool capturing = false);

  // Makes `user` wait for everything enqueued so far; where it is captured, for what its graph has of that.
  void Join(DeviceStream user);
  bool Idle();
  // Grows while kernels and the library's calls end: they leave no words that others could read.
  std::uint64_t Passed();
  // Whether all that was enqueued so far neither pulls any more nor lets peers do so.
  bool PullsDone();
  bool Capturing(DeviceStream user);

  std::size_t slot_bytes() const { return slot_bytes_; }

 private:
  struct RingEnd {
    std::shared_ptr<Event> last;  // the end of the last kernel that used it, and
    DeviceStream stream;          // where that was
  };

  void Enqueue(const DeviceShape& shape, Bases bases, std::span<const std::uint64_t> signatures, DeviceStream user,
               bool join, bool capturing);
  void Begin(const DeviceShape& shape, DeviceStream user);
  void JoinLanes(DeviceStream user);
  void FollowCaptured(DeviceStream user);
  void EndCaptured(DeviceStream user);
  void EnqueueLocal(const DeviceShape& shape, const Bases& bases, DeviceStream user, bool capturing);
  void EnqueueAlone(const DeviceShape& shape, const Bases& bases, std::span<const std::uint64_t> signatures,
                    DeviceStream user);
  void Run(const DeviceShape& shape, const DeviceAction& action, const Bases& bases,
           std::span<const std::uint64_t> signatures, DeviceStream stream);
  void Expect(const DeviceShape& shape, SlotEdge& edge, std::size_t n, std::uint64_t signature);
  void Work(const DeviceShape& shape, const DeviceAction& action, const Bases& bases, std::byte* slot,
            DeviceLanes& lanes);
  void RunMessages(const MessagesKernel& kernel, const Bases& bases, DeviceStream stream, bool capturing);
  void RunLocal(const DeviceShape& shape, const LocalAction& local, const Bases& bases, DeviceStream stream);
  void Launch(const DeviceKernel& kernel, std::size_t n, void** params, DeviceStream stream);

  std::shared_ptr<Driver> driver_;
  DeviceLanes lanes_;
  std::byte* staging_;
  std::size_t slot_bytes_;
  std::vector<SlotEdge> edges_;
  std::unique_ptr<VendorCollectives> island_;
  int place_ = 0;  // of this rank in its island
  int members_ = 1;
  std::uint64_t calls_ = 0;
  Event kernel_;                   // the end of the last EnqueueKernel
  Event local_;                    // the end of the last EnqueueLocal
  Event pulled_;                   // the end of the last program of pulls
  Event captured_;                 // the end of what was captured last, and
  std::uint64_t captured_in_ = 0;  // the capture's number, and the stream
  DeviceStream captured_on_ = nullptr;
  std::unique_ptr<DeviceCapture> capture_;
  DeviceStream kernel_stream_ = nullptr;
  Milestones user_calls_;  // of kernels and the library
  std::vector<std::byte> kernel_arguments_;
  std::map<std::uint16_t, RingEnd> rings_;
  std::array<bool, kDeviceLanes> ended_{};  // which lanes' ends were recorded
  DeviceStream joined_ = nullptr;           // the stream that waits for the last call already
  bool is_joined_ = true;
};

}  // namespace hetcoll
