// Runs a kernel's threads. Blocks run one after another; the threads of a block are fibers of the queue's thread that
// change places at barriers and where one spins, so a block may wait for other processes and for its own threads, but
// not for a later block.
#include <link.h>
#include <sched.h>
#include <time.h>

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

enum class State : unsigned char { kFresh, kReady, kSpinning, kBarrier, kWarpBarrier, kDone };

struct Worker {  // runs threads of the block, one after another, until one has to wait
  Fiber fiber;
  unsigned thread = 0;  // the one it runs
  bool finished = true;
  explicit Worker(void (*run)()) : fiber(run) {}
};

struct Range {
  std::uintptr_t begin = 0;
  std::size_t size = 0;
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
  Worker* pick(State state);
  Worker& idle();
  bool release_barrier();
  bool release_warps();
  void allow(std::uintptr_t address, std::size_t nbytes);
  bool own_data(std::uintptr_t address, std::size_t nbytes);

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
  std::vector<std::unique_ptr<Worker>> workers_;
  Worker* current_ = nullptr;
  Fiber scheduler_;
  Range known_[4];
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

void BlockRun::enter() { running->work(); }

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
    worker.fiber.restart(&BlockRun::enter);
  } else {
    set_thread(worker.thread);
    states_[worker.thread] = State::kReady;
  }
  worker.fiber.resume(scheduler_);
}

Worker* BlockRun::pick(State state) {
  for (auto& worker : workers_) {
    if (!worker->finished && states_[worker->thread] == state) return worker.get();
  }
  return nullptr;
}

Worker& BlockRun::idle() {
  for (auto& worker : workers_) {
    if (worker->finished) return *worker;
  }
  return *workers_.emplace_back(std::make_unique<Worker>(&BlockRun::enter));
}

bool BlockRun::release_barrier() {
  unsigned waiting = 0;
  for (State state : states_) waiting += state == State::kBarrier;
  if (waiting == 0 || waiting + ended_ != threads_) return false;
  result_ = votes_;
  votes_ = 0;
  for (State& state : states_) {
    if (state == State::kBarrier) state = State::kReady;
  }
  return true;
}

// Lanes that wait with one mask go on when all of that mask (but those that ended) have come.
bool BlockRun::release_warps() {
  bool released = false;
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
      if ((mask >> lane & 1) && states_[first + lane] == State::kWarpBarrier) states_[first + lane] = State::kReady;
    }
    released |= all;
  }
  return released;
}

Error BlockRun::run(unsigned x, unsigned y, unsigned z) {
  view_.block[0] = x, view_.block[1] = y, view_.block[2] = z;
  next_ = ended_ = votes_ = 0;
  std::fill(states_.begin(), states_.end(), State::kFresh);
  running = this;
  Execution::Pause pause(execution_);
  while (ended_ < threads_ && error_ == kOk) {
    if (Worker* ready = pick(State::kReady)) {
      resume(*ready);
    } else if (next_ < threads_) {
      resume(idle());
    } else if (release_barrier() || release_warps()) {
      continue;
    } else if (pick(State::kSpinning)) {
      if (Error error = pause.rest()) {
        if (error == kLaunchTimeout) complain("kernel %s spun for %g s", function_.name.c_str(), settings().timeout);
        return error;
      }
      for (State& state : states_) {
        if (state == State::kSpinning) state = State::kReady;
      }
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

void BlockRun::allow(std::uintptr_t address, std::size_t nbytes) { known_[next_known_++ % 4] = {address, nbytes}; }

// The kernel's own: its stack, and the variables of its module.
bool BlockRun::own_data(std::uintptr_t address, std::size_t nbytes) {
  if (current_->fiber.holds(address)) return true;
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

void BlockRun::access(std::uintptr_t address, std::size_t nbytes, bool write) {
  loads_ = write ? 0 : loads_ + 1;
  if (loads_ > kLoadsInARow) spin();
  if (epoch_ != Memory::instance().epoch()) {
    epoch_ = Memory::instance().epoch();
    for (Range& range : known_) range = {};
  }
  for (const Range& range : known_) {
    if (address - range.begin < range.size && nbytes <= range.begin + range.size - address) return;
  }
  if (reaches(execution_.device(), address, nbytes)) {
    Block block = Memory::instance().find(address);
    allow(block.base, block.size);
    return;
  }
  auto shared = reinterpret_cast<std::uintptr_t>(shared_.data());
  if (address - shared < shared_.size() && nbytes <= shared + shared_.size() - address) return;
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
