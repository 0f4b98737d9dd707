// Runs a kernel's threads. Blocks run one after another; the threads of a block are fibers of the queue's thread that
// change places at barriers and where one spins, so a block may wait for other processes and for its own threads, but
// not for a later block.
#include <link.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "module.h"
#include "operations.h"
#include "settings.h"

namespace fake {
namespace {

constexpr unsigned kLoadsInARow = 256;  // so many loads and no store: it waits for somebody

enum class State : unsigned char { kFresh, kRunning, kReady, kSpinning, kBarrier, kWarpBarrier, kDone };

struct Worker {  // runs threads of the block, one after another, until one has to wait
  Fiber fiber;
  unsigned thread = 0;  // the one it runs
  bool finished = true;
  explicit Worker(void (*run)()) : fiber(run) {}
};
using Workers = std::vector<std::unique_ptr<Worker>>;

thread_local Workers spare;  // of kernels that this queue ran before

struct Range {
  std::uintptr_t begin = 0;
  std::size_t size = 0;

  bool holds(std::uintptr_t address, std::size_t nbytes) const {
    return address - begin < size && nbytes <= begin + size - address;
  }
};

class BlockRun {
 public:
  BlockRun(Execution& execution, const Function& function, const Shape& shape, void** arguments)
      : execution_(execution), function_(function), arguments_(arguments), shared_(shape.shared_bytes) {
    view_.warp_size = kVendor.warp;
    view_.shared = shared_.data();
    std::memcpy(view_.block_dim, shape.block, sizeof shape.block);
    std::memcpy(view_.grid_dim, shape.grid, sizeof shape.grid);
    threads_ = shape.block[0] * shape.block[1] * shape.block[2];
    states_.resize(threads_);
    lanes_.resize(threads_);
    slots_.resize(threads_);
  }
  ~BlockRun();
  BlockRun(const BlockRun&) = delete;
  BlockRun& operator=(const BlockRun&) = delete;

  Error run(unsigned x, unsigned y, unsigned z);

  const ThreadView* view() const { return &view_; }
  void access(std::uintptr_t address, std::size_t nbytes, bool write);
  unsigned barrier(unsigned predicate);
  void warp_barrier(unsigned long long lanes);
  unsigned long long* warp_slots() { return &slots_[current_->thread / kVendor.warp * kVendor.warp]; }
  void spin() { leave(State::kSpinning); }
  void stop(Error error);

 private:
  static void enter();
  void work();
  void leave(State state);
  void resume(Worker& worker);
  void set_thread(unsigned thread);
  Worker& next_ready();
  Worker& idle();
  bool release(State state);
  bool release_barrier();
  bool release_warps();
  void allow(std::uintptr_t address, std::size_t nbytes);
  bool own_data(std::uintptr_t address, std::size_t nbytes);
  void forget();
  void look_up(std::uintptr_t address, std::size_t nbytes, bool write);

  Execution& execution_;
  const Function& function_;
  void** arguments_;
  std::vector<unsigned char> shared_;
  ThreadView view_{};
  unsigned threads_ = 0;
  unsigned next_ = 0;  // thread that has not begun
  unsigned ended_ = 0;
  Error error_ = kOk;
  std::vector<State> states_;
  std::vector<unsigned long long> lanes_;  // that a thread waits for in its warp
  std::vector<unsigned long long> slots_;
  unsigned votes_ = 0, result_ = 0;
  Workers workers_;
  std::vector<Worker*> idle_;  // those that have finished
  std::size_t turn_ = 0;       // whose turn it is among the workers
  unsigned ready_ = 0;         // threads
  Worker* current_ = nullptr;
  Fiber scheduler_;
  static constexpr unsigned kKnown = 8;
  Range known_[kKnown];
  const Range* last_ = known_;  // of these, which held what was looked for
  unsigned next_known_ = 0;
  std::uint64_t epoch_ = 0;
  unsigned loads_ = 0;
};

thread_local BlockRun* running = nullptr;

void BlockRun::set_thread(unsigned thread) {
  view_.thread[0] = thread % view_.block_dim[0];
  view_.thread[1] = thread / view_.block_dim[0] % view_.block_dim[1];
  view_.thread[2] = thread / view_.block_dim[0] / view_.block_dim[1];
}

BlockRun::~BlockRun() {
  for (auto& worker : workers_) {  // what the others were doing when the kernel failed is forgotten
    if (worker->finished) spare.push_back(std::move(worker));
  }
}

void BlockRun::enter() {
  for (;;) running->work();
}

// A worker runs fresh threads until one has to wait; the next worker goes on from there.
void BlockRun::work() {
  Worker* self = current_;
  while (next_ < threads_ && error_ == kOk) {
    self->thread = next_++;
    set_thread(self->thread);
    function_.kernel->call(arguments_);
    states_[self->thread] = State::kDone;
    ++ended_;
  }
  self->finished = true;
  idle_.push_back(self);
  scheduler_.resume(self->fiber);
}

void BlockRun::leave(State state) {
  states_[current_->thread] = state;
  loads_ = 0;
  scheduler_.resume(current_->fiber);
}

// Ends the block from within a thread; whatever its workers were doing is forgotten.
void BlockRun::stop(Error error) {
  error_ = error;
  scheduler_.resume(current_->fiber);
}

void BlockRun::resume(Worker& worker) {
  current_ = &worker;
  if (worker.finished) {
    worker.finished = false;
  } else {
    set_thread(worker.thread);
    states_[worker.thread] = State::kRunning;
  }
  worker.fiber.resume(scheduler_);
}

// Only while there is one.
Worker& BlockRun::next_ready() {
  --ready_;
  for (;; ++turn_) {
    if (turn_ >= workers_.size()) turn_ = 0;
    Worker& worker = *workers_[turn_];
    if (!worker.finished && states_[worker.thread] == State::kReady) return worker;
  }
}

Worker& BlockRun::idle() {
  if (idle_.empty()) {
    if (spare.empty()) spare.push_back(std::make_unique<Worker>(&BlockRun::enter));
    idle_.push_back(workers_.emplace_back(std::move(spare.back())).get());
    spare.pop_back();
  }
  Worker& worker = *idle_.back();
  idle_.pop_back();
  return worker;
}

// All that are in this state may go on; whether there were any.
bool BlockRun::release(State state) {
  for (State& each : states_) {
    if (each != state) continue;
    each = State::kReady;
    ++ready_;
  }
  return ready_ != 0;
}

bool BlockRun::release_barrier() {
  unsigned waiting = 0;
  for (State state : states_) waiting += state == State::kBarrier;
  if (waiting == 0 || waiting + ended_ != threads_) return false;
  result_ = votes_;
  votes_ = 0;
  return release(State::kBarrier);
}

// Lanes that wait with one mask go on when all of that mask (but those that ended) have come.
bool BlockRun::release_warps() {
  for (unsigned thread = 0; thread < threads_; ++thread) {
    if (states_[thread] != State::kWarpBarrier) continue;
    unsigned first = thread / kVendor.warp * kVendor.warp;
    unsigned long long mask = lanes_[thread];
    bool all = true;
    for (unsigned lane = 0; lane < kVendor.warp && first + lane < threads_; ++lane) {
      State state = states_[first + lane];
      bool here = state == State::kDone || (state == State::kWarpBarrier && lanes_[first + lane] == mask);
      if ((mask >> lane & 1) && !here) all = false;
    }
    for (unsigned lane = 0; all && lane < kVendor.warp && first + lane < threads_; ++lane) {
      if (!(mask >> lane & 1) || states_[first + lane] != State::kWarpBarrier) continue;
      states_[first + lane] = State::kReady;
      ++ready_;
    }
  }
  return ready_ != 0;
}

Error BlockRun::run(unsigned x, unsigned y, unsigned z) {
  view_.block[0] = x, view_.block[1] = y, view_.block[2] = z;
  next_ = ended_ = votes_ = ready_ = 0;
  std::fill(states_.begin(), states_.end(), State::kFresh);
  running = this;
  Execution::Pause pause(execution_);
  while (ended_ < threads_ && error_ == kOk) {
    if (ready_) {
      resume(next_ready());
    } else if (next_ < threads_) {
      resume(idle());
    } else if (release_barrier() || release_warps()) {
      continue;
    } else if (std::count(states_.begin(), states_.end(), State::kSpinning)) {
      if (Error error = pause.rest()) {
        if (error == kLaunchTimeout) complain("kernel %s spun for %g s", function_.name.c_str(), settings().timeout);
        return error;
      }
      release(State::kSpinning);
    } else {
      complain("kernel %s: its threads wait at different barriers", function_.name.c_str());
      return kLaunchFailed;
    }
  }
  return error_;
}

unsigned BlockRun::barrier(unsigned predicate) {
  votes_ += predicate != 0;
  leave(State::kBarrier);
  return result_;
}

void BlockRun::warp_barrier(unsigned long long lanes) {
  lanes_[current_->thread] = lanes;
  leave(State::kWarpBarrier);
}

void BlockRun::allow(std::uintptr_t address, std::size_t nbytes) { known_[next_known_++ % kKnown] = {address, nbytes}; }

// The variables of the kernel's module.
bool BlockRun::own_data(std::uintptr_t address, std::size_t nbytes) {
  struct Search {
    std::uintptr_t code, address;
    std::size_t nbytes;
    Range found;
  } search{reinterpret_cast<std::uintptr_t>(function_.kernel), address, nbytes, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& wanted = *static_cast<Search*>(data);
        auto inside = [&](std::uintptr_t begin, std::size_t size, std::uintptr_t what) { return what - begin < size; };
        bool ours = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr) & part = info->dlpi_phdr[i];
          ours |= part.p_type == PT_LOAD && inside(info->dlpi_addr + part.p_vaddr, part.p_memsz, wanted.code);
        }
        for (int i = 0; ours && i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr) & part = info->dlpi_phdr[i];
          auto begin = part.p_type == PT_TLS ? reinterpret_cast<std::uintptr_t>(info->dlpi_tls_data)
                                             : info->dlpi_addr + part.p_vaddr;
          bool holds = (part.p_type == PT_TLS || part.p_type == PT_LOAD) && begin && part.p_memsz >= wanted.nbytes;
          if (holds && wanted.address - begin <= part.p_memsz - wanted.nbytes) wanted.found = {begin, part.p_memsz};
        }
        return ours ? 1 : 0;
      },
      &search);
  if (search.found.size) allow(search.found.begin, search.found.size);
  return search.found.size != 0;
}

// Before every load and store: what is not known yet is looked up elsewhere, for this to be short.
void BlockRun::access(std::uintptr_t address, std::size_t nbytes, bool write) {
  loads_ = write ? 0 : loads_ + 1;
  if (loads_ > kLoadsInARow) spin();
  if (epoch_ != Memory::epoch()) forget();
  if (last_->holds(address, nbytes) || current_->fiber.holds(address)) return;
  for (const Range& range : known_) {
    if (!range.holds(address, nbytes)) continue;
    last_ = &range;
    return;
  }
  look_up(address, nbytes, write);
}

void BlockRun::forget() {
  epoch_ = Memory::epoch();
  for (Range& range : known_) range = {};
}

[[gnu::noinline]] void BlockRun::look_up(std::uintptr_t address, std::size_t nbytes, bool write) {
  Range shared{reinterpret_cast<std::uintptr_t>(shared_.data()), shared_.size()};
  if (shared.holds(address, nbytes)) {
    allow(shared.begin, shared.size);
    return;
  }
  if (reaches(execution_.device(), address, nbytes)) {
    Block block = Memory::instance().find(address);
    allow(block.base, block.size);
    return;
  }
  if (own_data(address, nbytes)) return;
  Block near = Memory::instance().find(address);
  complain("kernel %s, block %u, thread %u: a %s of %zu bytes at 0x%zx, %s", function_.name.c_str(), view_.block[0],
           view_.thread[0], write ? "store" : "load", nbytes, address,
           near.size ? "across the end of an allocation, or of a device that is no peer" : "in no allocation");
  stop(kIllegalAddress);
}

}  // namespace

const Hooks& hooks() {
  static const Hooks table = {
      [] { return running->view(); },
      [](unsigned long address, unsigned long nbytes, int write) { running->access(address, nbytes, write != 0); },
      [](unsigned predicate) { return running->barrier(predicate); },
      [](unsigned long long lanes) { running->warp_barrier(lanes); },
      [] { return running->warp_slots(); },
      [] { running->spin(); },
      [] {
        complain("a kernel trapped");
        running->stop(kLaunchFailed);
      },
  };
  return table;
}

Error run_kernel(Execution& execution, const Function& function, const Shape& shape, void** arguments) {
  BlockRun block(execution, function, shape, arguments);
  for (unsigned z = 0; z < shape.grid[2]; ++z) {
    for (unsigned y = 0; y < shape.grid[1]; ++y) {
      for (unsigned x = 0; x < shape.grid[0]; ++x) {
        if (Error error = block.run(x, y, z)) return error;
      }
    }
  }
  return kOk;
}

}  // namespace fake
