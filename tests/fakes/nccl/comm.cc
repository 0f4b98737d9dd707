#include "comm.h"

#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "settings.h"

namespace fake::nccl {
namespace {

// Waits until `ready`, the communicator is aborted or the time is up.
template <class Ready>
Result wait_for(const Comm& comm, Ready ready) {
  double deadline = now() + settings().timeout;
  for (unsigned rests = 0; !ready(); ++rests) {
    if (comm.aborted()) return kInternalError;
    if (now() > deadline) return kSystemError;
    timespec nap{0, rests < 100 ? 20'000 : 200'000};
    nanosleep(&nap, nullptr);
  }
  return kSuccess;
}

// Ranks with equal ones sit in one host, as NCCL sees it.
std::int64_t host_hash() {
  const char* given = std::getenv("NCCL_HOSTID");
  char name[256] = {};
  if (!given) gethostname(name, sizeof name - 1);
  std::int64_t hash = 5381;
  for (const char* c = given ? given : name; *c; ++c) hash = hash * 33 + *c;
  return hash;
}

}  // namespace

const DriverAccess& driver() {
  static const DriverAccess* const access = [] {
    Dl_info info;
    dladdr(reinterpret_cast<const void*>(&driver), &info);
    std::string path = info.dli_fname;
    path = path.substr(0, path.rfind('/')) + (kVendor.name[0] == 'C' ? "/libcuda.so.1" : "/libamdhip64.so");
    void* library = dlopen(path.c_str(), RTLD_NOW);
    void* symbol = library ? dlsym(library, "fake_driver") : nullptr;
    if (!symbol) {
      complain("%s", dlerror());
      std::abort();
    }
    return reinterpret_cast<const DriverAccess* (*)()>(symbol)();
  }();
  return *access;
}

Comm::Comm(Device& device, int size, int rank, bool blocking)
    : device_(device), size_(size), rank_(rank), blocking_(blocking) {}

Comm::~Comm() { join_background(); }

void Comm::join_background() {
  ask();
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(mutex_);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void Comm::wait_until_asked() const {
  while (!asked_) {
    timespec nap{0, 200'000};
    nanosleep(&nap, nullptr);
  }
}

// Everybody's four words, in rank order. Every rank makes the same exchanges in the same order.
Result Comm::exchange(const std::int64_t mine[4], std::vector<std::int64_t>* all) {
  std::uint64_t round = ++rounds_;
  Peer& own = segment_->peer(rank_);
  std::copy(mine, mine + 4, own.words[round % 2]);
  own.exchanged.store(round, std::memory_order_release);
  all->clear();
  for (int rank = 0; rank < size_; ++rank) {
    Peer& peer = segment_->peer(rank);
    if (Result result = wait_for(*this, [&] { return peer.exchanged.load(std::memory_order_acquire) >= round; })) {
      last_error = "rank " + std::to_string(rank) + " has not come";
      return result;
    }
    all->insert(all->end(), peer.words[round % 2], peer.words[round % 2] + 4);
  }
  return kSuccess;
}

// NCCL refuses two ranks on one GPU.
Result Comm::check_devices() {
  const std::int64_t mine[4] = {device_.physical, host_hash(), size_, 0};
  std::vector<std::int64_t> all;
  if (Result result = exchange(mine, &all)) return result;
  for (int a = 0; a < size_; ++a) {
    for (int b = 0; b < a; ++b) {
      if (all[4 * a] != all[4 * b] || all[4 * a + 1] != all[4 * b + 1]) continue;
      last_error = "Duplicate GPU detected : rank " + std::to_string(b) + " and rank " + std::to_string(a) +
                   " both on device " + device_.bus_id();
      return kInvalidUsage;
    }
  }
  return kSuccess;
}

Result Comm::meet(const Id& id) {
  segment_ = Segment::join(id, size_);
  if (!segment_) {
    last_error = "the unique id is not one, or not any more, or was used with another number of ranks";
    return kInvalidArgument;
  }
  Result result = check_devices();
  forget(id);  // all have opened it, or the meeting has failed
  return result;
}

Result Comm::split(int color, int key, std::shared_ptr<Comm>* out, bool blocking) {
  const std::int64_t mine[4] = {color, key, 0, 0};
  std::vector<std::int64_t> all, ids;
  if (Result result = exchange(mine, &all)) return result;
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank) {
    if (all[4 * rank] == color) members.push_back(rank);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return all[4 * a + 1] < all[4 * b + 1]; });
  bool first = color >= 0 && members[0] == rank_;
  Id id{};
  if (first && !Segment::make(&id)) return kSystemError;
  const std::int64_t place[4] = {id.process, id.fd, static_cast<std::int64_t>(id.nonce), first};
  if (Result result = exchange(place, &ids)) return result;
  if (color < 0) return kSuccess;
  const std::int64_t* chosen = &ids[4 * static_cast<std::size_t>(members[0])];
  std::strncpy(id.magic, "fake", sizeof id.magic);
  std::strncpy(id.vendor, kVendor.name, sizeof id.vendor - 1);
  id.process = static_cast<std::int32_t>(chosen[0]);
  id.fd = static_cast<std::int32_t>(chosen[1]);
  id.nonce = static_cast<std::uint64_t>(chosen[2]);
  auto place_of = std::find(members.begin(), members.end(), rank_) - members.begin();
  auto comm = std::make_shared<Comm>(device_, static_cast<int>(members.size()), static_cast<int>(place_of), blocking);
  Result result = comm->meet(id);
  if (result == kSuccess) *out = comm;
  return result;
}

Result Comm::connect(const std::vector<Message>& messages) {
  const auto pair = [&](const Message& m) -> Pair& {
    return m.sends ? segment_->pair(rank_, m.peer) : segment_->pair(m.peer, rank_);
  };
  for (const Message& m : messages) pair(m).joined |= m.peer == rank_ ? 3U : m.sends ? 1U : 2U;
  for (const Message& m : messages) {
    if (Result result = wait_for(*this, [&] { return pair(m).joined == 3U; })) {
      last_error = "rank " + std::to_string(m.peer) + " does not connect";
      return result;
    }
  }
  return kSuccess;
}

Result Comm::enqueue(std::shared_ptr<Work> work, const std::vector<Stream*>& streams) {
  std::lock_guard lock(mutex_);
  std::vector<CompletionPtr> after;
  if (last_) after.push_back(last_);  // one communicator's operations run in the order of their calls
  for (std::size_t i = 1; i < streams.size(); ++i) {
    if (CompletionPtr last = driver().last(streams[i])) after.push_back(last);
  }
  auto self = shared_from_this();
  auto mark = std::make_shared<char>();  // lives as long as the body, so in a graph as long as that
  Body body = [self, work, mark](Execution& execution) { return run_work(*self, *work, execution); };
  CompletionPtr done;
  Error error = driver().enqueue(streams[0], "collective", std::move(body), std::move(after), &done);
  if (done) {
    last_ = done;
  } else if (error == kOk) {
    captured_.emplace_back(mark);
  }
  for (std::size_t i = 1; i < streams.size() && error == kOk && done; ++i) {
    error = driver().enqueue(streams[i], "wait for a collective", [](Execution&) { return kOk; }, {done}, nullptr);
  }
  if (error != kOk) last_error = "the driver refused a launch with error " + std::to_string(error);
  return error == kOk ? kSuccess : kUnhandledCudaError;
}

void Comm::drain() {
  join_background();
  CompletionPtr last;
  std::vector<std::weak_ptr<void>> captured;
  {
    std::lock_guard lock(mutex_);
    last = last_;
    captured = captured_;
  }
  if (last) last->wait();
  for (const std::weak_ptr<void>& each : captured) {
    while (!each.expired()) {
      timespec nap{0, 1'000'000};
      nanosleep(&nap, nullptr);
    }
  }
}

int Comm::add_operator(double factor, int dtype) {
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < operators_.size(); ++i) {
    if (operators_[i].second >= 0) continue;
    operators_[i] = {factor, dtype};
    return static_cast<int>(i) + kPreMulSum;
  }
  operators_.emplace_back(factor, dtype);
  return static_cast<int>(operators_.size()) - 1 + kPreMulSum;
}

bool Comm::remove_operator(int op) {
  std::lock_guard lock(mutex_);
  auto at = static_cast<std::size_t>(op - kPreMulSum);
  if (op < kPreMulSum || at >= operators_.size() || operators_[at].second < 0) return false;
  operators_[at].second = -1;
  return true;
}

bool Comm::resolve(int op, int dtype, int* plain, double* factor) {
  *plain = op;
  *factor = 1;
  if (op >= kSum && op <= kMin) return true;
  if (op == kAvg) {
    if (!integral(dtype)) *factor = 1.0 / size_;
    return true;
  }
  std::lock_guard lock(mutex_);
  auto at = static_cast<std::size_t>(op - kPreMulSum);
  if (op < kPreMulSum || at >= operators_.size() || operators_[at].second != dtype) return false;
  *plain = kSum;
  *factor = operators_[at].first;
  return true;
}

}  // namespace fake::nccl
