// What a collective's kernel does: the ranks pass their data through chunks in shared memory, step by step. Each waits
// for all others in every step, so that an order of calls that differs between ranks stands still, as it does with
// the real library; FAKE_TIMEOUT bounds that.
#include <algorithm>
#include <cstring>
#include <string>

#include "comm.h"
#include "settings.h"

namespace fake::nccl {

class Run {
 public:
  Run(Comm& comm, Execution& execution) : comm_(comm), execution_(execution), shared_(*comm.segment_) {}

  Error all(const Work& work);

 private:
  Error collective(const Collective& c);
  Error messages(const std::vector<Message>& messages);

  struct Progress {
    std::size_t done = 0;
    bool ended = false;
  };

  template <class Ready>
  Error until(Ready ready, const char* what) {
    return execution_.until(
        [&] { return comm_.aborted() || ready(); },
        [&] { return std::string("in a collective, rank ") + std::to_string(comm_.rank()) + ", " + what; });
  }

  bool reaches(std::uintptr_t address, std::size_t nbytes) const {
    return nbytes == 0 || driver().reaches(execution_.device(), address, nbytes);
  }
  Error check(const Collective& c) const;
  void publish(const Collective& c, std::size_t at, std::size_t elements);
  void take(const Collective& c, std::size_t at, std::size_t elements);
  Error step(const Collective& c, std::size_t at, std::size_t elements);
  Error agree(const Call& mine);
  bool advance(const Message& message, Progress* progress, Error* error);

  Comm& comm_;
  Execution& execution_;
  Segment& shared_;
};

namespace {

// How many shares of `count` elements the send and the receive buffer have on this rank; 0: it has none.
struct Shares {
  int send, recv, staged;  // staged: in the chunk
};

Shares shares(const Collective& c, int rank, int size) {
  bool root = rank == c.root;
  switch (c.kind) {
    case kAllReduce:
      return {1, 1, 1};
    case kReduce:
      return {1, root ? 1 : 0, 1};
    case kBroadcast:
      return {root ? 1 : 0, 1, 1};
    case kAllGather:
      return {1, size, 1};
    case kReduceScatter:
      return {size, 1, size};
    case kAllToAll:
      return {size, size, size};
    case kGather:
      return {1, root ? size : 0, 1};
    case kScatter:
      return {root ? size : 0, 1, size};
  }
  return {};
}

}  // namespace

Error Run::check(const Collective& c) const {
  Shares s = shares(c, comm_.rank(), comm_.size());
  std::size_t share = c.count * itemsize(c.dtype);
  bool fine = reaches(c.send, share * static_cast<std::size_t>(s.send)) &&
              reaches(c.recv, share * static_cast<std::size_t>(s.recv));
  if (!fine) complain("collective %d of %zu elements: a buffer is not (all) memory of this device", c.kind, c.count);
  return fine ? kOk : kIllegalAddress;
}

// This rank's part of elements [at, at + elements) of every share, into its chunk.
void Run::publish(const Collective& c, std::size_t at, std::size_t elements) {
  Shares s = shares(c, comm_.rank(), comm_.size());
  std::size_t item = itemsize(c.dtype), part = elements * item;
  unsigned char* chunk = shared_.chunk(comm_.rank());
  for (std::size_t i = 0; i < static_cast<std::size_t>(s.send); ++i) {
    std::memcpy(chunk + i * part, reinterpret_cast<const void*>(c.send + (i * c.count + at) * item), part);
    if (c.factor != 1) scale(chunk + i * part, elements, c.dtype, c.factor);
  }
}

// What the others published, into the receive buffer.
void Run::take(const Collective& c, std::size_t at, std::size_t elements) {
  int rank = comm_.rank(), size = comm_.size();
  Shares s = shares(c, rank, size);
  std::size_t item = itemsize(c.dtype), part = elements * item;
  if (s.recv == 0) return;
  auto to = [&](int share) {
    return reinterpret_cast<void*>(c.recv + (static_cast<std::size_t>(share) * c.count + at) * item);
  };
  std::size_t own = s.staged > 1 ? static_cast<std::size_t>(rank) * part : 0;  // this rank's share in a chunk
  if (c.kind == kAllReduce || c.kind == kReduce || c.kind == kReduceScatter) {
    std::vector<const unsigned char*> sources;
    for (int peer = 0; peer < size; ++peer) sources.push_back(shared_.chunk(peer) + own);
    reduce(to(0), sources.data(), size, elements, c.dtype, c.op);
  } else if (c.kind == kBroadcast || c.kind == kScatter) {
    std::memcpy(to(0), shared_.chunk(c.root) + own, part);
  } else {
    for (int peer = 0; peer < size; ++peer) std::memcpy(to(peer), shared_.chunk(peer) + own, part);
  }
}

Error Run::agree(const Call& mine) {
  for (int rank = 0; rank < comm_.size(); ++rank) {
    const Call& other = shared_.peer(rank).call;
    if (other == mine) continue;
    complain("rank %d calls collective %d of %d elements of type %d, op %d, root %d; rank %d calls %d, %d, %d, %d, %d",
             comm_.rank(), static_cast<int>(mine.kind), static_cast<int>(mine.count), static_cast<int>(mine.dtype),
             static_cast<int>(mine.op), static_cast<int>(mine.root), rank, static_cast<int>(other.kind),
             static_cast<int>(other.count), static_cast<int>(other.dtype), static_cast<int>(other.op),
             static_cast<int>(other.root));
    return kLaunchFailed;
  }
  return kOk;
}

Error Run::step(const Collective& c, std::size_t at, std::size_t elements) {
  std::uint64_t number = comm_.steps_++;
  auto all = [&](auto count) {
    for (int rank = 0; rank < comm_.size(); ++rank) {
      if ((shared_.peer(rank).*count).load(std::memory_order_acquire) < number) return false;
    }
    return true;
  };
  Peer& own = shared_.peer(comm_.rank());
  if (Error error = until([&] { return all(&Peer::consumed); }, "for ranks to end the step before")) return error;
  if (comm_.aborted()) return kOk;
  own.call = {static_cast<std::uint64_t>(c.kind), c.count, static_cast<std::uint64_t>(c.dtype),
              static_cast<std::uint64_t>(c.op), static_cast<std::uint64_t>(c.root)};
  publish(c, at, elements);
  own.published.store(++number, std::memory_order_release);
  if (Error error = until([&] { return all(&Peer::published); }, "for ranks that have not come")) return error;
  if (comm_.aborted()) return kOk;
  if (Error error = agree(own.call)) return error;
  take(c, at, elements);
  own.consumed.store(number, std::memory_order_release);
  return kOk;
}

Error Run::collective(const Collective& c) {
  if (Error error = check(c)) return error;
  if (c.late != kOk) {  // as when a link fails: the kernel never ends, the communicator knows, somebody must abort it
    comm_.set_state(static_cast<Result>(static_cast<int>(c.late)));
    return until([] { return false; }, "that a test made fail");
  }
  Shares s = shares(c, comm_.rank(), comm_.size());
  std::size_t most = kChunk / itemsize(c.dtype) / static_cast<std::size_t>(s.staged);
  for (std::size_t at = 0; at < c.count && !comm_.aborted(); at += most) {
    if (Error error = step(c, at, std::min(most, c.count - at))) return error;
  }
  return kOk;
}

// One slot of a message, if the peer has left room or data; true when something moved.
bool Run::advance(const Message& message, Progress* progress, Error* error) {
  int self = comm_.rank();
  Pair& pair = message.sends ? shared_.pair(self, message.peer) : shared_.pair(message.peer, self);
  std::uint64_t produced = pair.produced.load(std::memory_order_acquire);
  std::uint64_t consumed = pair.consumed.load(std::memory_order_acquire);
  if (message.sends ? produced != consumed : produced == consumed) return false;
  std::size_t part = std::min(kSlot, message.nbytes - progress->done);
  auto* buffer = reinterpret_cast<unsigned char*>(message.buffer) + progress->done;
  if (message.sends) {
    pair.message = message.nbytes;
    std::memcpy(pair.data, buffer, part);
    pair.produced.store(produced + 1, std::memory_order_release);
  } else {
    if (pair.message != message.nbytes) {
      complain("rank %d receives %zu bytes from rank %d, which sends %zu", self, message.nbytes, message.peer,
               static_cast<std::size_t>(pair.message));
      *error = kLaunchFailed;
      return true;
    }
    std::memcpy(buffer, pair.data, part);
    pair.consumed.store(consumed + 1, std::memory_order_release);
  }
  progress->done += part;
  progress->ended = progress->done == message.nbytes;
  return true;
}

// All at once; those to (or from) one peer in their order.
Error Run::messages(const std::vector<Message>& messages) {
  for (const Message& message : messages) {
    if (!reaches(message.buffer, message.nbytes)) return kIllegalAddress;
  }
  std::vector<Progress> progress(messages.size());
  std::size_t left = messages.size();
  while (left > 0) {
    Error error = kOk;
    auto move = [&] {
      bool moved = false;
      for (std::size_t i = 0; i < messages.size(); ++i) {
        bool first =
            std::none_of(messages.begin(), messages.begin() + static_cast<long>(i), [&](const Message& before) {
              auto at = static_cast<std::size_t>(&before - messages.data());
              return before.sends == messages[i].sends && before.peer == messages[i].peer && !progress[at].ended;
            });
        if (progress[i].ended || !first || !advance(messages[i], &progress[i], &error)) continue;
        moved = true;
        left -= progress[i].ended;
      }
      return moved;
    };
    if (Error timeout = until(move, "for a message")) return timeout;
    if (error != kOk || comm_.aborted()) return error;
  }
  return kOk;
}

Error Run::all(const Work& work) {
  // Replays of graphs are not in the communicator's order: they must not meet another operation of it.
  std::unique_lock lock(comm_.running_, std::defer_lock);
  if (Error error = until([&] { return lock.try_lock(); }, "for another operation to end")) return error;
  if (!lock.owns_lock()) return kOk;
  for (const Collective& each : work.collectives) {
    if (Error error = collective(each)) return error;
  }
  return messages(work.messages);
}

Error run_work(Comm& comm, const Work& work, Execution& execution) {
  Run run(comm, execution);
  return run.all(work);
}

}  // namespace fake::nccl
